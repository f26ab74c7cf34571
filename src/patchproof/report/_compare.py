"""Several certifications side by side: the paper's layout, differences from a baseline, and what changes certified
accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from patchproof.report._certification import attacked
from patchproof.report._counts import FEW_PER_CLASS, MOST_CLASSES, Comparison, Paired, holm
from patchproof.report._figures import INK, Picture, dots, drawing, error_line, numbers, percent_axis
from patchproof.report._tables import SHOWN_ROWS, Cell, Column, Section, Table, percent
from patchproof.report._trace import TracedRun, rate_note, split_words
from patchproof.runs import ACCURACIES
from patchproof.training import STRATEGIES
from patchproof.types import printable, shortened, shortened_name

NO_NAME = "† The training strategy is not known; the name is the folder of the first run with these weights."
CONTEXT = (
    "Paper: the number printed in the paper that this project implements. Numbers in brackets are for another "
    "architecture or input size than ours; they are context, not a comparison."
)
MADE = ("date", "commit", "sha256 of the weights")
"""Columns of the table of runs that only its files have."""

HOLM = "Holm: p corrected for the number of rows tested together."
LABEL = 28
"""Letters of a label that fit beside a figure."""

COST = "strategy, and its extra passes per image in training"
FEW_TICKS = 4
"""Most names of strategies that fit side by side below an axis."""


def side_by_side(traced: Sequence[TracedRun], comparisons: Sequence[Comparison]) -> list[Section]:
    """All sections about several certifications; `comparisons` are those that can be paired with the baseline."""
    pictures = comparison_pictures(traced)
    if comparisons:
        paired = against_baseline(comparisons, pictures)
    else:
        paired = [Section("figures", "What changes certified accuracy", (), pictures, shown=bool(pictures))]
    # The table of strategies has the accuracies of all runs; without strategies it would only be the runs again.
    strategies = any(one.paper for one in traced) or all(one.strategy is not None for one in traced)
    elsewhere = [*MADE, "defended", "certified"] if strategies else [*MADE]
    if all(str(one.run.folder.resolve()).endswith(one.run.name) for one in traced):
        elsewhere.append("folder")
    return [
        Section("comparison", "Strategies", tables=[paper_table(traced)], shown=strategies),
        *paired,
        *attacked([one.run for one in traced]),
        Section("runs", "The runs", tables=[runs_table(traced).concise(elsewhere)]),
    ]


def runs_table(traced: Sequence[TracedRun]) -> Table:
    """One row per run, with everything in which it may differ from the others."""
    rows = list[dict[str, Cell]]()
    for one in traced:
        run = one.run
        made = [run.manifest.get("date"), run.manifest.get("commit"), run.weights_sha256]
        row: dict[str, Cell] = {
            "run": run.name,
            "folder": printable(str(run.folder)),
            "strategy": one.strategy,
            "data set": run.dataset,
            "split": split_words(run),
            "architecture": run.architecture,
            "defence": run.defense,
            "guarantee": run.guarantee,
            "masks": run.masks_words,
            "patch": run.patch_words,
            "images": one.certified.n,
            **{name: run.rates.get(name) for name in ACCURACIES},
            "passes per image": sum(r.forwards for r in run.good) / len(run.good) if run.good else None,
            "seconds": run.seconds,
            **{name: value and printable(str(value)) for name, value in zip(MADE, made, strict=True)},
        }
        rows.append(row)
    return Table.of("runs", "The runs", rows, [rate_note(one.run for one in traced)])


def paper_table(traced: Sequence[TracedRun]) -> Table:
    """One row per strategy; each setting has columns for the defended and the certified accuracy, and the paper's.

    A second run of one strategy in one setting begins another row, and these rows have the names of their runs.
    """
    several_defenses = len({one.defense_words for one in traced}) > 1
    found: dict[tuple[str, int], dict[Column, Cell]] = {}
    runs: dict[tuple[str, int], list[str]] = {}
    columns: dict[Column, None] = {}
    for one in traced:
        run = one.run
        defense = [one.defense_words] if several_defenses else []
        setting = " · ".join([run.dataset, run.architecture, *defense, run.masks_words, run.patch_words])
        cells: dict[Column, Cell] = {}
        for name in ("defended", "certified"):
            cells[Column(name, setting)] = run.rates[name]
            cells[Column(f"{name}, paper", setting)] = paper_words(one, name)
        number = 1
        while cells.keys() & found.setdefault((one.label, number), {}).keys():
            number += 1
        found[one.label, number] |= cells
        runs.setdefault((one.label, number), []).append(run.name)
        columns |= dict.fromkeys(cells)
    known = [column for column in columns if any(row.get(column) is not None for row in found.values())]
    rows = []
    for label, number in sorted(found, key=lambda row: (*strategy_order(row[0]), row[1])):
        name = f"{label} ({', '.join(runs[label, number])})" if (label, 2) in found else label
        rows.append((name, *map(found[label, number].get, known)))
    about = [rate_note(one.run for one in traced)]
    if any(one.strategy is None for one in traced):
        about.append(NO_NAME)
    if any(one.paper for one in traced):
        about.append(CONTEXT)
    return Table("comparison", "Defended and certified accuracy", [Column("strategy"), *known], rows, about)


def paper_words(one: TracedRun, name: str) -> str | None:
    """The paper's accuracy: `93.7%` for the same network, `(ResNet 93.7%, ViT 95.5%)` for others."""
    known = [(what, percent(value / 100)) for what, cell in one.paper if (value := getattr(cell, name)) is not None]
    if not known:
        return None
    if known[0][0] is None:
        return known[0][1]
    return f"({', '.join(f'{what} {value}' for what, value in known)})"


def strategy_order(label: str) -> tuple[int, str]:
    """Sorting key: strategies in the paper's order, then the rest by name."""
    known = list(STRATEGIES)
    return known.index(label) if label in known else len(known), label


def mixed_notices(traced: Sequence[TracedRun]) -> list[str]:
    """Why the runs are not directly comparable."""
    runs, notices = [one.run for one in traced], []
    if len({run.guarantee for run in runs}) > 1:
        notices.append("mixed: certified detection and certified recovery are different claims and not comparable")
    if len({run.threat for run in runs}) > 1:
        patches = shortened("; ".join(dict.fromkeys(run.patch_words for run in runs)), 120)
        notices.append(
            f"mixed: the runs are about different patches, so their certificates claim different things: {patches}"
        )
    if len({run.data_sha256 for run in runs}) > 1:
        sets = ", ".join(sorted({run.dataset for run in runs}))
        notices.append(
            f"mixed: the runs are not about the same images ({sets}; other data, split or limit), so their rates are "
            "not comparable"
        )
    elif len({frozenset(record.index for record in run.good) for run in runs}) > 1:
        counts = ", ".join(sorted({f"{one.certified.n:,}" for one in traced}))
        notices.append(f"mixed: the runs cover different images of the same data set (n = {counts})")
    return notices


def paired_cells(paired: Paired, corrected: float) -> dict[str, Cell]:
    counts = {"images": paired.n, "gained": paired.gained, "lost": paired.lost}
    return {**counts, "difference in points": paired, "McNemar p": paired.p, "p, Holm": corrected}


def against_baseline(comparisons: Sequence[Comparison], pictures: Sequence[Picture]) -> list[Section]:
    """Differences from the baseline, then the same by class, smallest p first. The figure shows the runs, or if there
    is only one, its classes."""
    one, base, several = comparisons[0], comparisons[0].base, len(comparisons) > 1
    heading = f"Against {base.name}" if several else f"{one.run.name} against {base.name}"
    rows: list[dict[str, Cell]] = [
        {"run": c.run.name, "accuracy": name, **paired_cells(c.accuracies[name], c.corrected[name])}
        for name in reversed(base.rates)
        for c in comparisons
        if name in c.accuracies
    ]
    about = [
        f"Gained: images that only this run has right or certified. Lost: only {base.name}. The difference is this run "
        f"minus {base.name} on the same images, with Newcombe's 95% interval (method 10); McNemar's test is exact. If "
        "interval and test disagree, which can happen at the limit of what n images show, the test decides."
    ]
    every = Table.of("paired", heading, rows, [*about, HOLM] if several else about, digits=3)
    by_class, enough = list[tuple[float, dict[str, Cell]]](), set[str]()
    for c in comparisons:
        if 1 < len(c.classes) <= c.certified.n / FEW_PER_CLASS:
            enough.add(c.run.name)
        adjusted = holm([paired.p for paired in c.classes.values()])
        for (label, paired), p in zip(c.classes.items(), adjusted, strict=True):
            named: dict[str, Cell] = {"class": base.class_name(label), "run": c.run.name}
            by_class.append((paired.p, named | paired_cells(paired, p)))
    ordered = [row for _, row in sorted(by_class, key=lambda pair: pair[0])]
    classes = Table.of("paired-classes", f"Certified against {base.name}, by class", ordered, [HOLM], digits=3)
    counted = [row for row in classes.rows if row[1] in enough][:SHOWN_ROWS]
    which = f"with the smallest p, from runs with {FEW_PER_CLASS} images per class or more"
    classes = classes.excerpt(counted, which).concise([] if several else ["run"])
    if several:
        parts = [c.run.name.rsplit("/", 1) if len(c.run.name) > LABEL else [c.run.name] for c in comparisons]
        names = ["/\n".join(shortened_name(part, LABEL) for part in label) for label in parts]
        found = [c.certified for c in comparisons]
        certified = [row for row in every.rows if row[1] == "certified"]
        shown = every.excerpt(certified, "about certified accuracy").concise(["accuracy"])
    else:
        few = one.classes if len(one.classes) <= MOST_CLASSES else {}
        names = ["all images", *(f"{shortened(base.class_name(k), 24)} (n = {v.n})" for k, v in few.items())]
        found = [one.certified, *few.values()]
        shown = every.concise(["run", "p, Holm"])
    title = f"Certified, against the baseline, n = {numbers(c.certified.n for c in comparisons)}"
    alt = f"{title}: {len(names)} paired differences with 95% intervals."
    height = 1.55 + (0.36 if any("\n" in name for name in names) else 0.27) * len(names)
    with drawing("paired", title, alt, height=height) as (picture, axes):
        axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        dots(axes, names, [("", found, False)])
        axes.set_xlabel("percentage points\n(right of 0: better)")
    return [
        Section("paired", heading, (), [picture, *pictures], [shown]),
        Section("paired-classes", "By class, on the same images", tables=[classes], shown=bool(enough)),
    ]


Tick = tuple[float, str]
"""A place on an axis by its value, and the label there."""


def comparison_pictures(traced: Sequence[TracedRun]) -> list[Picture]:
    """Certified accuracy against masks per axis, patch size and training cost."""

    def per_axis(one: TracedRun) -> Tick | None:
        return None if one.run.axes is None else (max(one.run.axes), str(max(one.run.axes)))

    def patch_share(one: TracedRun) -> Tick | None:
        share = one.run.patch_percent
        return None if share is None else (share, f"{round(share, 1):g}")

    def cost(one: TracedRun) -> Tick | None:
        return None if one.passes is None else (one.passes, f"{shortened(one.label, 14)}: {one.passes}")

    found = [
        accuracy_picture(traced, "masks", "masks per axis", per_axis, ["patch_words"]),
        accuracy_picture(traced, "patch size", "patch (% of the image's area)", patch_share, ["masks_words"]),
        accuracy_picture(traced, "training cost", COST, cost, ["masks_words", "patch_words"]),
    ]
    return [picture for picture in found if picture is not None]


def accuracy_picture(
    traced: Sequence[TracedRun], what: str, unit: str, tick: Callable[[TracedRun], Tick | None], same: Sequence[str]
) -> Picture | None:
    """A line for each group of runs that differ in nothing but the tick; None if no two do.

    A training cost belongs to a strategy, so there the strategies of a group are points that are not joined.
    """
    joined, groups = unit != COST, dict[tuple[tuple[str, ...], object], list[tuple[Tick, TracedRun]]]()
    for one in traced:
        at, run = tick(one), one.run
        if at is not None and one.certified.n:
            named = [one.strategy or f"weights of {one.first}"] if joined else []
            named += [f"{run.dataset}, n = {one.certified.n:,}", run.architecture, one.defense_words]
            words = (*named, *(getattr(run, name) for name in same))
            own = (one.label, run.weights_sha256) if joined else None
            groups.setdefault((words, (own, run.data_sha256, run.native)), []).append((at, one))
    lines = {key: sorted(group, key=lambda point: point[0]) for key, group in groups.items() if len(dict(group)) > 1}
    if not lines:
        return None
    differ = [i for i, words in enumerate(zip(*(words for words, _ in lines), strict=True)) if len(set(words)) > 1]
    labels = [shortened(" · ".join(words[i] for i in differ or [0]), 60) for words, _ in lines]
    points = [point for line in lines.values() for point in line]
    ticks = sorted({at for at, _ in points})
    title = f"Certified accuracy against {what}, n = {numbers(one.certified.n for _, one in points)}"
    alt = f"{title}: {len(lines)} {'lines' if joined else 'rows of points'} with 95% intervals."
    key = "by-" + what.removesuffix(" size").replace(" ", "-")
    with drawing(key, title, alt, height=3.0 + 0.16 * len(lines)) as (picture, axes):
        for number, (label, line) in enumerate(zip(labels, lines.values(), strict=True)):
            if labels.count(label) > 1:  # e.g. two trainings with one strategy
                label += f" ({shortened_name(line[0][1].run.name, 40)})"
            places, rates = [float(ticks.index(at)) for at, _ in line], [one.certified for _, one in line]
            error_line(axes, places, rates, label=label, number=number, of=len(lines), joined=joined)
        slant, anchor = (0.0, "center") if joined or len(ticks) <= FEW_TICKS else (40.0, "right")
        axes.set_xticks(range(len(ticks)), [label for _, label in ticks], rotation=slant, ha=anchor)
        guarantees = ", ".join(sorted({one.run.guarantee for _, one in points}))
        axes.set(xlabel=unit, ylabel=f"certified ({guarantees}), % of images", xlim=(-0.5, len(ticks) - 0.5))
        percent_axis(axes, (one.certified for _, one in points))
    return picture
