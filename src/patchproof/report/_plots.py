"""The figures about records, attacks, comparisons and trainings; every one says its n and shows 95% intervals."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from patchproof.report._compare import TracedRun, strategy_order
from patchproof.report._content import ATTACK_NAMES, MOST_CLASSES, attacked_rates, by_class, mask_shares, outcomes
from patchproof.report._figures import (
    COLOURS,
    FILLS,
    INK,
    LINES,
    Dots,
    Picture,
    dots,
    draw,
    error_line,
    percent_axis,
    percents,
)
from patchproof.report._paired import Comparison, Paired
from patchproof.runs import Rate, Record, StoredCertification, StoredTraining
from patchproof.runs._reading import shortened, shortened_name

BINS = 24
OUTER = 0.5
"""Percent of the values at either end that share the outermost bins, so that one outlier does not squeeze the rest."""

POINTS = 120
"""Points of a loss curve; each is the mean over neighbouring steps."""

FEW_TICKS = 8
FEW_NAMES = 4
"""Most ticks with numbers, or names, that fit side by side."""


def counts(values: Iterable[int]) -> str:
    return shortened(", ".join(f"{value:,}" for value in sorted(set(values))), 24)


def class_picture(run: StoredCertification) -> Picture:
    found, certified = by_class(run), f"certified ({run.guarantee})"
    n = f"n = {len(run.good):,}"
    if len(found) > MOST_CLASSES:
        ordered = sorted((rates["certified"] for rates in found.values()), key=lambda rate: (rate.rate, rate.n))

        def ranked(axes: Axes) -> None:
            ranks = list(range(1, len(ordered) + 1))
            low, high = ([100 * rate.interval[end] for rate in ordered] for end in (0, 1))
            axes.fill_between(ranks, low, high, step="mid", color=COLOURS[0], alpha=0.25, lw=0, label="95% interval")
            axes.step(ranks, percents(ordered)[0], where="mid", color=COLOURS[0], label=certified)
            axes.set(xlabel="classes, from the lowest to the highest", ylabel="% of the class", ylim=(-2, 102))

        alt = f"Certified accuracy of {len(ordered)} classes in rising order with 95% intervals."
        return draw("classes", f"Certified accuracy of {len(ordered):,} classes, {n}", alt, ranked)
    names = [f"{shortened(run.class_name(label), 24)} (n = {r['certified'].n})" for label, r in found.items()]

    def plot(axes: Axes) -> None:
        series: list[Dots] = [
            (certified, [r["certified"] for r in found.values()], False),
            ("defended", [r["defended"] for r in found.values()], True),
        ]
        dots(axes, names, series, step=-0.32)
        axes.set(xlabel="images of the class (%)", xlim=(-2, 102))

    alt = f"Certified and defended accuracy of {len(names)} classes with 95% intervals, {n}."
    return draw("classes", f"Accuracy by class, {n}", alt, plot, height=1.2 + 0.27 * len(names))


def histogram(
    groups: Sequence[Sequence[float]], *, n: int, bins: int = BINS
) -> tuple[list[float], list[list[Rate]], int] | None:
    """Edges of common bins of a round width, one of which begins at 0 if that is within; for each group its shares of
    all n images; and how many values are outside and count in the end bins."""
    values = np.array([value for group in groups for value in group], dtype=np.float64)
    if not len(values):
        return None
    least, most = np.percentile(values, [OUTER, 100 - OUTER]).tolist()
    room = 0.5 if least == most else 0.0
    edges = list(map(float, MaxNLocator(bins).tick_values(least - room, most + room)))
    low, high = edges[0], edges[-1]
    found = [np.histogram(np.clip(group, low, high), edges)[0].tolist() for group in groups]
    clipped = int(((values < low) | (values > high)).sum())
    return edges, [[Rate(k, n) for k in row] for row in found], clipped


def histogram_pictures(
    run: StoredCertification, key: str, title: str, unit: str, value: Callable[[Record], float | None]
) -> list[Picture]:
    """A histogram of the certified images and of the others; none where there are no values."""
    known = {words: [v for r in some if (v := value(r)) is not None] for words, some in outcomes(run).items()}
    counted = histogram(list(known.values()), n=len(run.good))
    if counted is None:
        return []
    edges, shares, clipped = counted

    def plot(axes: Axes) -> None:
        for (words, values), row, colour, (face, hatch) in zip(known.items(), shares, COLOURS, FILLS, strict=False):
            bars = [(ends, rate) for ends, rate in zip(pairwise(edges), row, strict=True) if rate.k]
            middles, widths = [sum(ends) / 2 for ends, _ in bars], [right - left for (left, right), _ in bars]
            heights, reach = percents([rate for _, rate in bars])
            label = f"{words} (n = {len(values):,})"
            look: dict[str, Any] = {
                "label": label,
                "facecolor": face,
                "edgecolor": colour,
                "hatch": hatch,
                "linewidth": 0.8,
            }
            axes.bar(middles, heights, widths, **look)
            axes.errorbar(middles, heights, yerr=reach, fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.5)
        if edges[0] < 0 < edges[-1]:
            axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        beyond = f"; {clipped:,} beyond the ends in the end bins" if clipped else ""
        axes.set(xlabel=unit + beyond, ylabel=f"images (% of {len(run.good):,})")

    certified, others = (len(values) for values in known.values())
    alt = f"Histogram of {unit} of {certified:,} certified and {others:,} other images."
    return [draw(key, f"{title}, n = {len(run.good):,}", alt, plot)]


def bounds_picture(runs: Sequence[StoredCertification]) -> Picture:
    """For each run the accuracies as points on a line; the band from certified to attacked holds robust accuracy."""
    found = [attacked_rates(run) for run in runs]

    def plot(axes: Axes) -> None:
        for place, rates in enumerate(found):
            if "attacked" in rates:
                low, high = 100 * rates["certified"].rate, 100 * rates["attacked"].rate
                axes.fill_betweenx([place - 0.34, place + 0.34], low, high, color=COLOURS[0], alpha=0.18, linewidth=0)
        names = [f"{shortened_name(run.name, 24)}\n({run.guarantee})" for run in runs]
        series: list[Dots] = [
            (words, [rates.get(name) for rates in found], name.endswith("attacked"))
            for name, words in ATTACK_NAMES.items()
        ]
        dots(axes, names, series, step=0.12)
        axes.set(xlabel="images (%)", xlim=(-2, 102))

    n = counts(len(run.attacks) for run in runs)
    alt = f"Five accuracies of {len(runs)} attacked runs with 95% intervals, n = {n}; a band holds what is robust."
    title = f"Bounds on robust accuracy, n = {n}"
    return draw("attacked", title, alt, plot, height=1.9 + 0.6 * len(runs))


def failing_masks_pictures(run: StoredCertification) -> list[Picture]:
    """Where in the grid of masks certificates fail: how often each mask is among those that decided."""
    shares = mask_shares(run, outcomes(run)["not certified"])
    if run.axes is None or not shares:
        return []
    rows, columns = run.axes
    values = np.array([100 * shares[i].rate if i in shares else 0.0 for i in range(rows * columns)])
    n = next(iter(shares.values())).n

    def plot(axes: Axes) -> None:
        mesh = axes.pcolormesh(values.reshape(rows, columns), cmap="Blues", vmin=0, edgecolors="white", linewidth=1)
        for number, value in enumerate(values):
            row, column = divmod(number, columns)
            ink = "#ffffff" if value > 0.6 * values.max() else "#000000"
            size = 9 if columns <= 6 else 6
            axes.text(column + 0.5, row + 0.5, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=size)
        axes.grid(visible=False)
        axes.set_xticks(np.arange(columns) + 0.5, [str(i + 1) for i in range(columns)])
        axes.set_yticks(np.arange(rows) + 0.5, [str(i + 1) for i in range(rows)])
        axes.set(xlabel="column of masks", ylabel="row of masks", aspect="equal", ylim=(rows, 0))
        axes.figure.colorbar(mesh, ax=axes, shrink=0.8, label="% of these images")

    alt = f"For each of {rows}×{columns} masks, the percentage of {n:,} images without a certificate that it decides."
    return [draw("failing-masks", f"Masks that decide failures, n = {n:,}", alt, plot, height=3.4)]


def paired_pictures(comparisons: Sequence[Comparison]) -> list[Picture]:
    """Certified accuracy against the baseline: of each run, or of each class of a single one."""
    one, rows = comparisons[0], list[tuple[str, Paired]]()
    if len(comparisons) > 1:
        for c in comparisons:
            rows.append(("/\n".join(shortened_name(part, 28) for part in c.run.name.rsplit("/", 1)), c.certified))
    elif 1 < len(one.classes) <= MOST_CLASSES:
        rows.append(("all images", one.certified))
        rows += [(f"{shortened(one.base.class_name(k), 24)} (n = {v.n})", v) for k, v in one.classes.items()]
    else:
        return []

    def plot(axes: Axes) -> None:
        axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        dots(axes, [name for name, _ in rows], [("", [paired for _, paired in rows], False)])
        axes.set_xlabel("percentage points (right of 0: better)")

    title = f"Certified, against the baseline, n = {counts(c.certified.n for c in comparisons)}"
    alt = f"{title}: {len(rows)} paired differences with 95% intervals."
    height = 1.4 + (0.36 if any("\n" in name for name, _ in rows) else 0.27) * len(rows)
    key = "paired" if len(comparisons) > 1 else "paired-classes"
    return [draw(key, title, alt, plot, height=height, title_width=32)]


Point = tuple[float, TracedRun]


def comparison_pictures(traced: Sequence[TracedRun]) -> list[Picture]:
    """Certified accuracy against masks per axis, patch size and training cost, where at least two values are there."""
    area, cost = "patch (% of the image's area)", "strategy, and its extra passes per image in training"
    sizes = ("masks_words", "patch_words")
    return [
        *_against(traced, "masks", "masks per axis", lambda one: one.run.axes and max(one.run.axes), sizes[1:]),
        *_against(traced, "patch size", area, lambda one: one.run.patch_percent, sizes[:1]),
        *_against(traced, "training cost", cost, lambda one: one.passes, sizes, by_strategy=False),
    ]


def _against(
    traced: Sequence[TracedRun],
    what: str,
    unit: str,
    x: Callable[[TracedRun], float | None],
    same: Sequence[str],
    *,
    by_strategy: bool = True,
) -> list[Picture]:
    """One line for all runs that differ in x alone, and have these properties in common; none where no two do."""
    lines = _lines(traced, x, same, by_strategy=by_strategy)
    if not lines:
        return []
    points = [point for line in lines.values() for point in line]
    costs = sorted({(value, one.label) for value, one in points}, key=lambda cost: (cost[0], strategy_order(cost[1])))
    differ = [i for i in range(len(next(iter(lines)))) if len({name[i] for name in lines}) > 1] or [0]
    guarantees = sorted({one.run.guarantee for _, one in points})

    def plot(axes: Axes) -> None:
        for number, (words, line) in enumerate(lines.items()):
            at = [float(value if by_strategy else costs.index((value, one.label))) for value, one in line]
            rates, name = [one.certified for _, one in line], shortened(" · ".join(words[i] for i in differ), 60)
            error_line(axes, at, rates, label=name, number=number, of=len(lines), joined=by_strategy)
        if by_strategy:
            values = sorted({value for value, _ in points})
            aside = 0.12 * (values[-1] - values[0])  # room for lines moved aside
            axes.set_xlim(values[0] - aside, values[-1] + aside)
            if len(values) <= FEW_TICKS:
                axes.set_xticks(values, [f"{round(v, 1):g}" for v in values])
                axes.minorticks_off()
        else:  # a place for each strategy in the order of its cost
            slanted: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
            names = [f"{shortened(name, 14)}: {cost:g}" for cost, name in costs]
            axes.set_xticks(range(len(costs)), names, **slanted if len(costs) > FEW_NAMES else {})
            axes.set_xlim(-0.5, len(costs) - 0.5)
        axes.set(xlabel=unit, ylabel=f"certified ({', '.join(guarantees)}), % of images")
        percent_axis(axes, (one.certified for _, one in points))

    title, n = f"Certified accuracy against {what}", counts(one.certified.n for _, one in points)
    alt = f"{title}: {len(lines)} {'lines' if by_strategy else 'rows of points'} with 95% intervals, n = {n}."
    key = "by-" + what.replace(" size", "").replace(" ", "-")
    return [draw(key, f"{title}, n = {n}", alt, plot, height=3.0 + 0.16 * len(lines))]


def _lines(
    traced: Sequence[TracedRun], x: Callable[[TracedRun], float | None], same: Sequence[str], *, by_strategy: bool
) -> dict[tuple[str, ...], list[Point]]:
    """Words that name a line -> its points in the order of x. A line joins runs that differ in x alone."""
    groups: dict[Hashable, list[Point]] = {}
    for one in traced:
        value, run = x(one), one.run
        if value is not None and one.certified.n:
            own = (one.label, run.weights_sha256) if by_strategy else ()
            facts = run.data_sha256, run.native, one.certified.n, run.architecture, one.defense_words
            groups.setdefault((own, facts, *(getattr(run, name) for name in same)), []).append((value, one))
    lines: dict[tuple[str, ...], list[Point]] = {}
    for group in groups.values():
        if len({value for value, _ in group}) > 1:
            one = group[0][1]
            images = f"{one.run.dataset}, n = {one.certified.n:,}"
            shared = [images, one.run.architecture, one.defense_words, *(getattr(one.run, name) for name in same)]
            words = name = (*([one.label] if by_strategy else []), *shared)
            number = 1
            while name in lines:  # e.g. two trainings with the same strategy
                number += 1
                name = (f"{words[0]} (run {number})", *words[1:])
            lines[name] = sorted(group, key=lambda point: point[0])
    return lines


def line_name(run: StoredTraining) -> str:
    return shortened_name(run.name if run.strategy in run.name else f"{run.name} ({run.strategy})", 40)


def training_pictures(runs: Sequence[StoredTraining]) -> list[Picture]:
    """Loss against steps, and both validation accuracies against epochs, of the runs that have some."""
    learned, validated = [run for run in runs if run.losses], [run for run in runs if run.epochs]

    def losses(axes: Axes) -> None:
        for number, run in enumerate(learned):
            # Neighbouring steps share a point: their mean, and the 10% and 90% of their losses.
            groups = np.array_split(np.array(run.losses, dtype=np.float64), min(POINTS, len(run.losses)))
            steps, means = ([float(group[:, column].mean()) for group in groups] for column in (0, 1))
            low, high = ([float(np.percentile(group[:, 1], q)) for group in groups] for q in (10, 90))
            colour = COLOURS[number % len(COLOURS)]
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(steps, means, color=colour, linestyle=LINES[number % len(LINES)], label=line_name(run))
        axes.set(xlabel="optimiser step", ylabel="loss on masked copies (nats)")

    def validation(axes: Axes, name: str) -> None:
        for number, run in enumerate(validated):
            at, rates = [float(epoch.epoch) for epoch in run.epochs], [getattr(epoch, name) for epoch in run.epochs]
            error_line(axes, at, rates, label=line_name(run), number=number, of=len(validated))
        last = max(epoch.epoch for run in validated for epoch in run.epochs)
        words = "certified (recovery)" if name == "certified" else name
        axes.set(xlabel="epoch", ylabel=f"{words}, %", xlim=(0.5, last + 0.5))
        percent_axis(axes, (getattr(epoch, name) for run in validated for epoch in run.epochs))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))

    pictures = []
    if learned:
        steps = counts(len(run.losses) for run in learned)
        alt = (
            f"Training loss of {len(learned)} runs ({steps} steps); the band holds 80% of the steps around each point."
        )
        title = f"Training loss, n = {steps} steps, 80% of them in the band"
        pictures.append(draw("loss", title, alt, losses, height=3.0 + 0.16 * len(learned)))
    for name in ("certified", "undefended") if validated else ():
        n = counts(getattr(epoch, name).n for run in validated for epoch in run.epochs)
        which = f"{name.capitalize()} accuracy on validation images after each epoch"
        alt, title = f"{which} of {len(validated)} runs, 95% intervals.", f"Validation, {name}, n = {n}"
        plot = partial(validation, name=name)
        pictures.append(draw(f"validation-{name}", title, alt, plot, height=3.0 + 0.16 * len(validated)))
    return pictures
