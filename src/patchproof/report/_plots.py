"""The figures about records, attacks, comparisons and trainings; every one says its n and shows 95% intervals."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from patchproof.report._compare import TracedRun, strategy_order, validated_with
from patchproof.report._counts import MOST_CLASSES, Comparison, attacked_rates, by_class, mask_shares, outcomes
from patchproof.report._figures import (
    COLOURS,
    FILLS,
    INK,
    LINES,
    Picture,
    dots,
    drawing,
    error_line,
    percent_axis,
    percents,
)
from patchproof.runs import Rate, Record, StoredCertification, StoredTraining
from patchproof.runs._reading import shortened, shortened_name

ATTACK_NAMES = {
    "undefended": "undefended",
    "undefended_attacked": "undefended, attacked",
    "defended": "defended",
    "attacked": "defended, attacked",
    "certified": "certified",
}
BINS = 24
OUTER = 0.5
"""Percent of the values at either end that share the outermost bins, so that one outlier does not squeeze the rest."""

POINTS = 120
"""Points of a loss curve; each is the mean over neighbouring steps."""

COST = "strategy, and its extra passes per image in training"
FEW_TICKS = 8
FEW_NAMES = 4
"""Most ticks with numbers, or names, that fit side by side."""


def counts(values: Iterable[int]) -> str:
    return shortened(", ".join(f"{value:,}" for value in sorted(set(values))), 24)


def class_picture(run: StoredCertification) -> Picture:
    """Both accuracies of each class, or of very many classes the certified one in rising order."""
    found, label, n = by_class(run), f"certified ({run.guarantee})", f"n = {len(run.good):,}"
    certified, many = [rates["certified"] for rates in found.values()], len(found) > MOST_CLASSES
    title = f"Certified accuracy of {len(found):,} classes, {n}" if many else f"Accuracy by class, {n}"
    height = 3.1 if many else 1.2 + 0.27 * len(found)
    with drawing("classes", title, f"{title}, with 95% intervals.", height=height) as (picture, axes):
        if many:
            ordered, ranks = sorted(certified, key=lambda rate: (rate.rate, rate.n)), range(1, len(found) + 1)
            low, high = ([100 * rate.interval[end] for rate in ordered] for end in (0, 1))
            axes.fill_between(ranks, low, high, step="mid", color=COLOURS[0], alpha=0.25, lw=0, label="95% interval")
            axes.step(ranks, percents(ordered)[0], where="mid", color=COLOURS[0], label=label)
            axes.set(xlabel="classes, from the lowest to the highest", ylabel="% of the class", ylim=(-2, 102))
        else:
            names = [f"{shortened(run.class_name(k), 24)} (n = {r['certified'].n})" for k, r in found.items()]
            defended = [rates["defended"] for rates in found.values()]
            dots(axes, names, [(label, certified, False), ("defended", defended, True)], step=-0.32)
            axes.set(xlabel="images of the class (%)", xlim=(-2, 102))
    return picture


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
    title = f"{title}, n = {len(run.good):,}"
    with drawing(key, title, f"{title}: histograms of the certified and of the other images.") as (picture, axes):
        for (words, values), row, colour, (face, hatch) in zip(known.items(), shares, COLOURS, FILLS, strict=False):
            bars = [(ends, rate) for ends, rate in zip(pairwise(edges), row, strict=True) if rate.k]
            middles, widths = [sum(ends) / 2 for ends, _ in bars], [right - left for (left, right), _ in bars]
            heights, reach = percents([rate for _, rate in bars])
            look: dict[str, Any] = {"facecolor": face, "edgecolor": colour, "hatch": hatch, "linewidth": 0.8}
            axes.bar(middles, heights, widths, label=f"{words} (n = {len(values):,})", **look)
            axes.errorbar(middles, heights, yerr=reach, fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.5)
        if edges[0] < 0 < edges[-1]:
            axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        beyond = f"; {clipped:,} beyond the ends in the end bins" if clipped else ""
        axes.set(xlabel=unit + beyond, ylabel=f"images (% of {len(run.good):,})")
    return [picture]


def bounds_picture(runs: Sequence[StoredCertification]) -> Picture:
    """For each run the accuracies as points on a line; the band from certified to attacked holds robust accuracy."""
    found = [attacked_rates(run) for run in runs]
    title = f"Bounds on robust accuracy, n = {counts(len(run.attacks) for run in runs)}"
    alt = f"{title}: five accuracies with 95% intervals; a band holds what is robust."
    with drawing("attacked", title, alt, height=1.9 + 0.6 * len(runs)) as (picture, axes):
        for place, rates in enumerate(found):
            if "attacked" in rates:
                low, high = 100 * rates["certified"].rate, 100 * rates["attacked"].rate
                axes.fill_betweenx([place - 0.34, place + 0.34], low, high, color=COLOURS[0], alpha=0.18, linewidth=0)
        names = [f"{shortened_name(run.name, 24)}\n({run.guarantee})" for run in runs]
        series = [(w, [rates.get(k) for rates in found], k.endswith("attacked")) for k, w in ATTACK_NAMES.items()]
        dots(axes, names, series, step=0.12)
        axes.set(xlabel="images (%)", xlim=(-2, 102))
    return picture


def failing_masks_pictures(run: StoredCertification) -> list[Picture]:
    """Where in the grid of masks certificates fail: how often each mask is among those that decided."""
    shares = mask_shares(run, outcomes(run)["not certified"])
    if run.axes is None or not shares:
        return []
    rows, columns = run.axes
    values = np.array([100 * shares[i].rate if i in shares else 0.0 for i in range(rows * columns)])
    n = next(iter(shares.values())).n
    alt = f"For each of {rows}×{columns} masks, the percentage of {n:,} images without a certificate that it decides."
    with drawing("failing-masks", f"Masks that decide failures, n = {n:,}", alt, height=3.4) as (picture, axes):
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
        picture.figure.colorbar(mesh, ax=axes, shrink=0.8, label="% of these images")
    return [picture]


def paired_pictures(comparisons: Sequence[Comparison]) -> list[Picture]:
    """Certified accuracy against the baseline: of each run, or of each class of a single one."""
    one, several = comparisons[0], len(comparisons) > 1
    if several:
        names = ["/\n".join(shortened_name(part, 28) for part in c.run.name.rsplit("/", 1)) for c in comparisons]
        found = [c.certified for c in comparisons]
    elif 1 < len(one.classes) <= MOST_CLASSES:
        classes = [f"{shortened(one.base.class_name(k), 24)} (n = {v.n})" for k, v in one.classes.items()]
        names, found = ["all images", *classes], [one.certified, *one.classes.values()]
    else:
        return []
    title = f"Certified, against the baseline, n = {counts(c.certified.n for c in comparisons)}"
    alt = f"{title}: {len(names)} paired differences with 95% intervals."
    key, tall = "paired" if several else "paired-classes", any("\n" in name for name in names)
    height = 1.4 + (0.36 if tall else 0.27) * len(names)
    with drawing(key, title, alt, height=height, title_width=32) as (picture, axes):
        axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        dots(axes, names, [("", found, False)])
        axes.set_xlabel("percentage points (right of 0: better)")
    return [picture]


def comparison_pictures(traced: Sequence[TracedRun]) -> list[Picture]:
    """Certified accuracy against masks per axis, patch size and training cost. A line joins all runs that differ
    in that alone; there is no figure where no two do.

    Costs belong to strategies: these have a place each, in the order of cost, and points that are not joined.
    """
    kinds: list[tuple[str, str, Callable[[TracedRun], float | None], list[str]]] = [
        ("masks", "masks per axis", lambda one: one.run.axes and max(one.run.axes), ["patch_words"]),
        ("patch size", "patch (% of the image's area)", lambda one: one.run.patch_percent, ["masks_words"]),
        ("training cost", COST, lambda one: one.passes, ["masks_words", "patch_words"]),
    ]
    pictures = []
    for what, unit, x, same in kinds:
        by_strategy = unit != COST
        groups: dict[Hashable, list[tuple[float, TracedRun]]] = {}
        for one in traced:
            value, run = x(one), one.run
            if value is not None and one.certified.n:
                own = (one.label, run.weights_sha256) if by_strategy else ()
                facts = run.data_sha256, run.native, one.certified.n, run.architecture, one.defense_words
                groups.setdefault((own, facts, *(getattr(run, name) for name in same)), []).append((value, one))
        lines = [sorted(group, key=lambda point: point[0]) for group in groups.values() if len(dict(group)) > 1]
        if not lines:
            continue
        names = []
        for (_, one), *_ in lines:
            shared = [f"{one.run.dataset}, n = {one.certified.n:,}", one.run.architecture, one.defense_words]
            named = [one.strategy or one.first] if by_strategy else []
            names.append([*named, *shared, *(getattr(one.run, name) for name in same)])
        differ = [i for i, words in enumerate(zip(*names, strict=True)) if len(set(words)) > 1] or [0]
        points = [point for line in lines for point in line]
        values, guarantees = sorted({value for value, _ in points}), sorted({one.run.guarantee for _, one in points})
        costs = sorted({(value, one.label) for value, one in points}, key=lambda c: (c[0], strategy_order(c[1])))
        title = f"Certified accuracy against {what}, n = {counts(one.certified.n for _, one in points)}"
        alt = f"{title}: {len(lines)} {'lines' if by_strategy else 'rows of points'} with 95% intervals."
        key = "by-" + what.removesuffix(" size").replace(" ", "-")
        with drawing(key, title, alt, height=3.0 + 0.16 * len(lines)) as (picture, axes):
            labels = [shortened(" · ".join(words[i] for i in differ), 60) for words in names]
            for number, (label, line) in enumerate(zip(labels, lines, strict=True)):
                at = [float(value if by_strategy else costs.index((value, one.label))) for value, one in line]
                rates, run = [one.certified for _, one in line], line[0][1].run
                if labels.count(label) > 1:  # e.g. two trainings with one strategy
                    label += f" ({shortened_name(run.name, 40)})"
                error_line(axes, at, rates, label=label, number=number, of=len(lines), joined=by_strategy)
            if by_strategy:
                aside = 0.12 * (values[-1] - values[0])  # room for lines moved aside
                axes.set_xlim(values[0] - aside, values[-1] + aside)
                if len(values) <= FEW_TICKS:
                    axes.set_xticks(values, [f"{round(v, 1):g}" for v in values])
                    axes.minorticks_off()
            else:
                slanted: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
                ticks = [f"{shortened(name, 14)}: {cost:g}" for cost, name in costs]
                axes.set_xticks(range(len(costs)), ticks, **slanted if len(costs) > FEW_NAMES else {})
                axes.set_xlim(-0.5, len(costs) - 0.5)
            axes.set(xlabel=unit, ylabel=f"certified ({', '.join(guarantees)}), % of images")
            percent_axis(axes, (one.certified for _, one in points))
        pictures.append(picture)
    return pictures


def line_name(run: StoredTraining) -> str:
    return shortened_name(run.name if run.strategy in run.name else f"{run.name} ({run.strategy})", 40)


def training_pictures(runs: Sequence[StoredTraining]) -> list[Picture]:
    """Loss against steps, and both validation accuracies against epochs, of the runs that have some."""
    learned, validated, pictures = [run for run in runs if run.losses], [run for run in runs if run.epochs], []
    if learned:
        banded = any(len(run.losses) > POINTS for run in learned)
        title = f"Training loss, n = {counts(len(run.losses) for run in learned)} steps"
        title += ", 80% of them in the band" * banded
        with drawing("loss", title, f"{title}.", height=3.0 + 0.16 * len(learned)) as (picture, axes):
            for number, run in enumerate(learned):
                # Neighbouring steps share a point: their mean, and the 10% and 90% of their losses.
                groups = np.array_split(np.array(run.losses, dtype=np.float64), min(POINTS, len(run.losses)))
                steps, means = ([float(group[:, column].mean()) for group in groups] for column in (0, 1))
                low, high = ([float(np.percentile(group[:, 1], q)) for group in groups] for q in (10, 90))
                colour = COLOURS[number % len(COLOURS)]
                axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
                axes.plot(steps, means, color=colour, linestyle=LINES[number % len(LINES)], label=line_name(run))
            axes.set(xlabel="optimiser step", ylabel="loss on masked copies (nats)")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        pictures.append(picture)
    every = [rate for run in validated for epoch in run.epochs for rate in (epoch.certified, epoch.undefended)]
    guarantees = ", ".join(sorted({validated_with(run)[1] for run in validated}))
    for name in ("certified", "undefended") if validated else ():
        title = f"Validation, {name}, n = {counts(rate.n for rate in every)}"
        alt, height = f"{title}: accuracy after each epoch, 95% intervals.", 3.0 + 0.16 * len(validated)
        with drawing(f"validation-{name}", title, alt, height=height) as (picture, axes):
            for number, run in enumerate(validated):
                at, rates = [epoch.epoch for epoch in run.epochs], [getattr(epoch, name) for epoch in run.epochs]
                error_line(axes, at, rates, label=line_name(run), number=number, of=len(validated))
            words = f"certified ({guarantees})" if name == "certified" else name
            last = max(run.epochs[-1].epoch for run in validated)
            axes.set(xlabel="epoch", ylabel=f"{words}, %", xlim=(0.5, last + 0.5))
            percent_axis(axes, every)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        pictures.append(picture)
    return pictures
