"""Several certifications side by side: the paper's layout, differences from a baseline, and what changes certified
accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from patchproof.geometry import parse_patches, size_words
from patchproof.report._certification import attacked, facts
from patchproof.report._counts import FEW_PER_CLASS, MOST_CLASSES, Comparison, Paired, TracedRun, holm, rate_note
from patchproof.report._figures import Picture, dot_picture, line_picture, numbers
from patchproof.report._tables import SHOWN_ROWS, Cell, Column, Section, Table, percent
from patchproof.runs import ACCURACIES, Rate, StoredCertification
from patchproof.training import STRATEGIES
from patchproof.types import shortened, shortened_name

COMPARED = {"strategy", "data set", "split", "architecture", "defence", "guarantee", "masks", "patch"}
"""Facts of runs that stand on the page; the files of the table have all."""

NO_NAME = "† The training strategy is not known; the name is the folder of the first run with these weights."
CONTEXT = (
    "Paper: the number printed in the paper that this project implements. Numbers in brackets are for another network "
    "or input size than ours; they are context, not a comparison."
)
PAIRED = (
    "Gained: images that only this run has right or certified. Lost: only the baseline. The difference is this run "
    "minus the baseline on the same images, with Newcombe's 95% interval (method 10); McNemar's test is exact. If "
    "interval and test disagree, which can happen at the limit of what n images show, the test decides."
)
HOLM = "Holm: p corrected for the number of rows tested together."
MADE_WITH = "What each run was made with (split, date, commit, sha256 of the weights and more) is in tables/runs.csv."
LABEL = 28
"""Letters of a label that fit beside a figure."""


def side_by_side(
    traced: Sequence[TracedRun], base: StoredCertification, comparisons: Sequence[Comparison]
) -> list[Section]:
    """All sections about several certifications; `comparisons` are those that can be paired with the baseline."""
    pictures = comparison_pictures(traced)
    # The table of strategies has the accuracies of all runs; without strategies it would only be the runs again.
    strategies = any(one.paper for one in traced) or all(one.strategy is not None for one in traced)
    elsewhere = facts(traced[0]).keys() - COMPARED | ({"defended", "certified"} if strategies else set())
    return [
        Section("comparison", "Strategies", tables=[paper_table(traced)], shown=strategies),
        *(against_baseline(base, comparisons) if comparisons else []),
        Section("figures", "What changes certified accuracy", (), pictures, shown=bool(pictures)),
        *attacked([one.run for one in traced]),
        Section("runs", "The runs", [MADE_WITH], tables=[runs_table(traced).concise(elsewhere)]),
    ]


def runs_table(traced: Sequence[TracedRun]) -> Table:
    """One row per run, with everything in which it may differ from the others."""
    rows = list[dict[str, Cell]]()
    for one in traced:
        passes = [record.forwards for record in one.run.good]
        row: dict[str, Cell] = {"run": one.run.name, **facts(one), "images": one.certified.n}
        row |= {name: one.run.rates.get(name) for name in ACCURACIES}
        rows.append(
            row | {"passes per image": sum(passes) / len(passes) if passes else None, "seconds": one.run.seconds}
        )
    return Table.of("runs", "The runs", rows, [rate_note(one.run for one in traced)])


def paper_table(traced: Sequence[TracedRun]) -> Table:
    """One row per strategy; each setting has columns for the defended and the certified accuracy, and the paper's.

    A second run of one strategy in one setting begins another row, and these rows have the names of their runs.
    """
    several_defenses = len({(one.run.defense, one.run.guarantee) for one in traced}) > 1
    found: dict[tuple[str, int], dict[Column, Cell]] = {}
    runs: dict[tuple[str, int], list[str]] = {}
    columns: dict[Column, None] = {}
    for one in traced:
        run = one.run
        defense = [f"{run.defense} ({run.guarantee})"] if several_defenses else []
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
    order, rows = list(STRATEGIES), list[list[Cell]]()  # strategies in the paper's order, then the rest by name
    for label, number in sorted(found, key=lambda row: (order.index(row[0]) if row[0] in order else len(order), row)):
        name = f"{label} ({', '.join(runs[label, number])})" if (label, 2) in found else label
        rows.append([name, *map(found[label, number].get, known)])
    about = [rate_note(one.run for one in traced)]
    about += [NO_NAME] if any(one.strategy is None for one in traced) else []
    about += [CONTEXT] if any(one.paper for one in traced) else []
    return Table("comparison", "Defended and certified accuracy", [Column("strategy"), *known], rows, about)


def paper_words(one: TracedRun, name: str) -> str | None:
    """The paper's accuracy: `93.7%` for the same network, `(ResNet 93.7%, ViT 95.5%)` for others."""
    values = {paper: getattr(cell, name) for paper, cell in one.paper.items()}
    words = ", ".join(f"{paper} {percent(value / 100)}".strip() for paper, value in values.items() if value is not None)
    return f"({words})" if words and "" not in values else words or None


def against_baseline(base: StoredCertification, comparisons: Sequence[Comparison]) -> list[Section]:
    """Differences from the baseline, then the same by class, smallest p first. The figure shows the runs, or if there
    is only one, its classes."""

    def cells(paired: Paired, corrected: float) -> dict[str, Cell]:
        counts = {"images": paired.n, "gained": paired.gained, "lost": paired.lost}
        return {**counts, "difference in points": paired, "McNemar p": paired.p, "p, Holm": corrected}

    one, several = comparisons[0], len(comparisons) > 1
    heading = f"Against {base.name}" if several else f"{one.run.name} against {base.name}"
    rows: list[dict[str, Cell]] = [
        {"run": c.run.name, "accuracy": name, **cells(c.accuracies[name], c.corrected[name])}
        for name in reversed(base.rates)
        for c in comparisons
        if name in c.accuracies
    ]
    every = Table.of("paired", heading, rows, [PAIRED, HOLM], digits=3)
    by_class, counted = list[tuple[float, dict[str, Cell]]](), set[str]()
    for c in comparisons:
        if 1 < len(c.classes) <= c.certified.n / FEW_PER_CLASS:
            counted.add(c.run.name)
        adjusted = holm([paired.p for paired in c.classes.values()])
        for (label, paired), p in zip(c.classes.items(), adjusted, strict=True):
            by_class.append((paired.p, {"class": base.class_name(label), "run": c.run.name, **cells(paired, p)}))
    ordered = [row for _, row in sorted(by_class, key=lambda pair: pair[0])]
    classes = Table.of("paired-classes", f"Certified against {base.name}, by class", ordered, [HOLM], digits=3)
    which = f"with the smallest p, from runs with {FEW_PER_CLASS} images per class or more"
    smallest = classes.excerpt([row for row in classes.rows if row[1] in counted][:SHOWN_ROWS], which)
    if several:
        parts = [c.run.name.rsplit("/", 1) if len(c.run.name) > LABEL else [c.run.name] for c in comparisons]
        names = ["/\n".join(shortened_name(part, LABEL) for part in label) for label in parts]
        found = [c.certified for c in comparisons]
    else:
        few = one.classes if len(one.classes) <= MOST_CLASSES else {}
        names = ["all images", *(f"{shortened(base.class_name(k), 24)} (n = {v.n})" for k, v in few.items())]
        found = [one.certified, *few.values()]
    title = f"Certified, against the baseline, n = {numbers(c.certified.n for c in comparisons)}"
    picture = dot_picture("paired", title, names, {"": found}, "percentage points\n(right of 0: better)")
    certified = [row for row in every.rows if row[1] == "certified" or not several]
    shown = every.excerpt(certified, "about certified accuracy").concise([] if several else ["p, Holm"])
    return [
        Section("paired", heading, (), [picture], [shown]),
        Section("paired-classes", "By class, on the same images", tables=[smallest.concise()], shown=bool(counted)),
    ]


def patch_kind(run: StoredCertification) -> str:
    """What patches of other sizes must share to be on one line: how many squares, and on which image they are.

    Other rectangles, and lists of sizes, differ in more than one number, so each is a kind of its own.
    """
    sizes = parse_patches(str(run.config["patch"]), (1, 1)) if run.native else run.patch_sizes
    if len(sizes) != 1 or sizes[0][0] != sizes[0][1]:
        return run.patch_words
    square = "one square" if run.patches == 1 else "two squares"
    return f"{square} on the original image" if run.native else square


def comparison_pictures(traced: Sequence[TracedRun]) -> list[Picture]:
    """Certified accuracy against masks per axis, patch size and training cost.

    A line joins only runs that differ in nothing else. A training cost belongs to a strategy, so there they are points.
    """
    pictures = list[Picture]()
    for key, what, unit, free in (
        ("by-masks", "masks", "masks per axis", {"masks"}),
        ("by-patch", "patch size", "patch (% of the image's area)", {"patch size"}),
        ("by-training-cost", "training cost", "strategy, and its extra passes per image", {"strategy", "weights"}),
    ):
        lines: dict[tuple[str, ...], dict[tuple[float, str], TracedRun]] = {}
        for one in traced:
            run = one.run
            value = {
                "by-masks": max(run.axes) if run.axes else None,
                "by-patch": run.patch_percent and round(run.patch_percent, 1),
                "by-training-cost": one.passes,
            }[key]
            facets = {
                "weights": run.weights_sha256 or run.name,
                "images": run.data_sha256 or run.name,
                "strategy": one.strategy or f"weights of {one.first}",
                "data": f"{run.dataset}, n = {one.certified.n:,}",
                "architecture": run.architecture,
                "defence": f"{run.defense} ({run.guarantee})",
                "input": f"input {size_words(run.image_size)}" if run.image_size else "",
                "masks": run.masks_words,
                "patch": patch_kind(run) if "patch size" in free else run.patch_words,
            }
            if value is not None and one.certified.n:
                tick = f"{shortened(one.label, 14)}: {value}" if "strategy" in free else f"{value:g}"
                line = tuple("" if name in free else facet for name, facet in facets.items())
                lines.setdefault(line, {}).setdefault((value, tick), one)
        lines = {line: dict(sorted(found.items())) for line, found in lines.items() if len(found) > 1}
        if not lines:
            continue
        ticks, series = sorted({at for found in lines.values() for at in found}), dict[str, list[Rate | None]]()
        differ = [len(set(facet)) > 1 for facet in zip(*lines, strict=True)][2:]
        for line, found in lines.items():
            # A line is named by what tells it from the others, and if that is a digest alone, by its first run too.
            words = [facet for facet, differs in zip(line[2:], differ, strict=True) if differs]
            label = shortened(" · ".join(words) or next(filter(None, line[2:])), 60)
            label += f" ({shortened_name(next(iter(found.values())).run.name, 40)})" if label in series else ""
            series[label] = [found[at].certified if at in found else None for at in ticks]
        every = [one for found in lines.values() for one in found.values()]
        title = f"Certified accuracy against {what}, n = {numbers(one.certified.n for one in every)}"
        ylabel = f"certified ({', '.join(sorted({one.run.guarantee for one in every}))}), % of images"
        names = [words for _, words in ticks]
        pictures.append(line_picture(key, title, series, unit, ylabel, ticks=names, joined="strategy" not in free))
    return pictures
