"""Several certifications beside each other: the paper's layout, the differences from a baseline, and what changes
certified accuracy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from patchproof.report._certification import attacked
from patchproof.report._counts import FEW_PER_CLASS, MOST_CLASSES, Comparison, Paired, holm
from patchproof.report._figures import INK, Picture, dots, drawing, error_line, numbers, percent_axis
from patchproof.report._tables import SHOWN_CLASSES, SHOWN_FAILURES, Cell, Column, Section, Table, percent
from patchproof.report._trace import TracedRun, rate_note, split_words
from patchproof.runs import ACCURACIES
from patchproof.runs._reading import printable, shortened, shortened_name
from patchproof.training import STRATEGIES

NO_NAME = "† The training strategy is not known: the name is that of the folder of the first run with these weights."
CONTEXT = (
    "Paper: the number printed in the paper this project implements. In brackets, with the network it is about: "
    "another architecture or input size than ours, shown for context and not as a comparison."
)
MADE = ("date", "commit", "sha256 of the weights")
"""In the files of the runs' table, not on the page."""

HOLM = "Holm: p corrected for the number of rows tested together."
BORDER = "Where interval and test disagree, as they may at the border of what n images can show, the test decides."
COST = "strategy, and its extra passes per image in training"
FEW_TICKS = 8
FEW_NAMES = 4
"""Most ticks with numbers, or names, that fit side by side."""


def side_by_side(traced: Sequence[TracedRun], comparisons: Sequence[Comparison]) -> list[Section]:
    """Certifications, those that can be paired with the baseline against it."""
    pictures, paired = comparison_pictures(traced), list[Section]()
    if comparisons:
        paired = against_baseline(comparisons, pictures)
    elif pictures:
        paired = [Section("figures", "What changes certified accuracy", (), pictures)]
    # No number twice: rows by strategy have the accuracies of the runs, unless they are only the runs again.
    repeated = not any(one.paper for one in traced) and any(one.strategy is None for one in traced)
    elsewhere = [*MADE, *([] if repeated else ["defended", "certified"])]
    elsewhere += ["strategy"] if all(one.strategy is None for one in traced) else []
    elsewhere += ["folder"] if all(str(one.run.folder.resolve()).endswith(one.run.name) for one in traced) else []
    return [
        Section("comparison", "Strategies", tables=[paper_table(traced)], shown=not repeated),
        *paired,
        *attacked([one.run for one in traced]),
        Section("runs", "The runs", tables=[runs_table(traced).concise(elsewhere)]),
    ]


def runs_table(traced: Sequence[TracedRun]) -> Table:
    """One row per run, with everything in which it may differ from the others."""
    rows = []
    for one in traced:
        run = one.run
        made = [*(run.manifest.get(name) for name in MADE[:2]), run.weights_sha256]
        row: dict[str, Cell] = {
            "run": run.name,
            "folder": printable(str(run.folder)),
            "strategy": one.label,
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
    return Table.of("runs", "The runs", rows, notes(traced))


def paper_table(traced: Sequence[TracedRun]) -> Table:
    """Rows are strategies; each setting has columns for the defended and the certified accuracy, and the paper's.

    A second run of the same strategy in the same setting goes to a second row, named by its run.
    """
    named = len({one.defense_words for one in traced}) > 1
    found: dict[tuple[str, int], dict[Column, Cell]] = {}
    runs: dict[tuple[str, int], list[str]] = {}
    columns: dict[Column, None] = {}
    for one in traced:
        run, defense = one.run, [one.defense_words] if named else []
        setting = " · ".join([run.dataset, run.architecture, *defense, run.masks_words, run.patch_words])
        cells: dict[Column, Cell] = {}
        for name in ("defended", "certified"):
            cells[Column(name, setting)] = run.rates[name]
            paper = [(what, percent(n / 100)) for what, cell in one.paper if (n := getattr(cell, name)) is not None]
            # `93.7%` for the same network, `(ResNet 93.7%, ViT 95.5%)` for others.
            others = ", ".join(f"{what} {value}" for what, value in paper)
            own = paper[0][1] if paper and paper[0][0] is None else f"({others})" if paper else None
            cells[Column(f"{name}, paper", setting)] = own
        number = 1
        while not cells.keys().isdisjoint(found.setdefault((one.label, number), {})):
            number += 1
        found[one.label, number] |= cells
        runs.setdefault((one.label, number), []).append(run.name)
        columns |= dict.fromkeys(cells)
    known = [column for column in columns if any(row.get(column) is not None for row in found.values())]
    rows = []
    for label, number in sorted(found, key=lambda row: (*strategy_order(row[0]), row[1])):
        name = f"{label} ({', '.join(runs[label, number])})" if (label, 2) in found else label
        rows.append((name, *map(found[label, number].get, known)))
    about = (*notes(traced), *((CONTEXT,) if any(one.paper for one in traced) else ()))
    return Table("comparison", "Defended and certified accuracy", [Column("strategy"), *known], rows, about)


def strategy_order(label: str) -> tuple[int, str]:
    """Strategies in the paper's order, then the rest by name."""
    known = list(STRATEGIES)
    return known.index(label) if label in known else len(known), label


def notes(traced: Sequence[TracedRun]) -> tuple[str, ...]:
    unknown = any(one.strategy is None for one in traced)
    return (rate_note(one.run for one in traced), *((NO_NAME,) if unknown else ()))


def mixed_notices(traced: Sequence[TracedRun]) -> list[str]:
    """Why the runs are not directly comparable."""
    runs, notices = [one.run for one in traced], []
    if len({run.guarantee for run in runs}) > 1:
        kinds = {kind: [run for run in runs if run.guarantee == kind] for kind in ("detection", "recovery")}
        names = {kind: ", ".join(shortened_name(run.name, 40) for run in found) for kind, found in kinds.items()}
        named = ", ".join(f"{kind} ({shortened(found, 200)})" for kind, found in names.items())
        notices.append(f"mixed: {named}; certified detection and certified recovery are not comparable")
    if len({run.threat for run in runs}) > 1:
        patches = shortened("; ".join(dict.fromkeys(run.patch_words for run in runs)), 120)
        notices.append(f"mixed: the runs are about different patches, their certificates different claims: {patches}")
    if len({run.data_sha256 for run in runs}) > 1:
        sets = ", ".join(sorted({run.dataset for run in runs}))
        return [*notices, f"mixed: the runs are not about the same images ({sets}); compare only within a data set"]
    if len({frozenset(record.index for record in run.good) for run in runs}) > 1:
        counts = ", ".join(sorted({f"{one.certified.n:,}" for one in traced}))
        notices.append(f"mixed: the runs cover different images of the same data set (n = {counts})")
    return notices


def against_baseline(comparisons: Sequence[Comparison], pictures: Sequence[Picture]) -> list[Section]:
    """One row per run and accuracy, with the images on which it differs from the baseline; and by class, smallest p
    first. Of several runs the figure is about the runs, of a single one about its classes."""
    one, base, several = comparisons[0], comparisons[0].base, len(comparisons) > 1

    def cells(paired: Paired, corrected: float) -> dict[str, Cell]:
        counts = {"images": paired.n, "gained": paired.gained, "lost": paired.lost}
        return {**counts, "difference in points": paired, "McNemar p": paired.p, "p, Holm": corrected}

    rows: list[dict[str, Cell]] = [
        {"run": c.run.name, "accuracy": name, **cells(c.accuracies[name], c.corrected[name])}
        for name in reversed(base.rates)
        for c in comparisons
        if name in c.accuracies
    ]
    notes = [
        f"Gained: only this run has the image right or certified; lost: only {base.name}. The difference, this run "
        f"minus {base.name}, is over the same images, with Newcombe's 95% interval (method 10); McNemar's test is "
        f"exact. {BORDER}",
        *([HOLM] if several else []),
    ]
    heading = f"Against {base.name}" if several else f"{one.run.name} against {base.name}"
    every = Table.of("paired", heading, rows, notes, digits=3)
    by_label, enough = [], set[str]()
    for c in comparisons:
        enough |= {c.run.name} if 1 < len(c.classes) <= c.certified.n / FEW_PER_CLASS else set()
        adjusted = holm([paired.p for paired in c.classes.values()])
        for (label, paired), p in zip(c.classes.items(), adjusted, strict=True):
            by_label.append((paired.p, {"class": base.class_name(label), "run": c.run.name, **cells(paired, p)}))
    ordered = [row for _, row in sorted(by_label, key=lambda pair: pair[0])]
    classes = Table.of("paired-classes", f"Certified against {base.name}, by class", ordered, [HOLM], digits=3)
    if several:
        key, names = (
            "paired",
            ["/\n".join(shortened_name(s, 28) for s in c.run.name.rsplit("/", 1)) for c in comparisons],
        )
        found = [c.certified for c in comparisons]
    else:
        key, labels = "paired-classes", one.classes.items()
        names = ["all images", *(f"{shortened(base.class_name(k), 24)} (n = {v.n})" for k, v in labels)]
        found = [one.certified, *one.classes.values()]
    title = f"Certified, against the baseline, n = {numbers(c.certified.n for c in comparisons)}"
    alt = f"{title}: {len(names)} paired differences with 95% intervals."
    height = 1.55 + (0.36 if any("\n" in name for name in names) else 0.27) * len(names)
    with drawing(key, title, alt, height=height, title_width=32) as (picture, axes):
        axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        dots(axes, names, [("", found, False)])
        axes.set_xlabel("percentage points\n(right of 0: better)")
    left_out, few = ([], SHOWN_FAILURES) if several else (["run"], SHOWN_CLASSES)
    counted = [row for row in classes.rows if row[1] in enough]
    classes = classes.excerpt(counted[:few], f"smallest p, of runs with {FEW_PER_CLASS} images per class or more")
    classes = classes.concise(left_out)
    if several:
        certified = replace(every, rows=[row for row in every.rows if row[1] == "certified"], whole=every)
        shown, pictures, drawn = certified.concise(["accuracy"]), [picture, *pictures], list[Picture]()
    else:
        shown, drawn = every.concise(["run", "p, Holm"]), [picture] if 1 < len(one.classes) <= MOST_CLASSES else []
    return [
        Section("paired", heading, (), pictures, [shown]),
        Section("paired-classes", "By class, on the same images", (), drawn, [classes], shown=bool(enough)),
    ]


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
        title = f"Certified accuracy against {what}, n = {numbers(one.certified.n for _, one in points)}"
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
