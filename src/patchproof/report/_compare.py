"""Several certifications side by side: how their weights were trained, and the paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from patchproof.geometry import parse_patches
from patchproof.models import checkpoint_sha256
from patchproof.recipes import ARCHITECTURES, recipes
from patchproof.report._content import guarantee_note, split_words
from patchproof.report._paired import Comparison, Paired, holm
from patchproof.report._tables import Cell, Column, Table, cell_text, percent
from patchproof.runs import ACCURACIES, Rate, StoredCertification, StoredTraining, read_run
from patchproof.runs._reading import find_weights, printable, shortened
from patchproof.training import STRATEGIES
from patchproof.types import PatchproofError, Size

PAPER_INPUT: Size = (224, 224)
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "resnet": ("ResNet", ("resnet", "resnext", "wide_resnet")),
    "vit": ("ViT", ("vit", "deit")),
    "convnext": ("ConvNeXt", ("convnext",)),
}
"""The paper's families: their names, and how timm's names of their members begin."""

NO_NAME = "† The training strategy is not known: the name is that of the folder of the first run with these weights."
BORDER = "Interval and test disagree, as they may at the border of what so many images can show: the test decides."
HOLM = "Holm: p corrected for the number of rows tested together."
MADE = ("date", "commit", "sha256 of the weights")
"""In the files of the runs' table, not on the page."""

COMMON = ("data set", "split", "architecture", "defence", "guarantee", "masks", "patch", "images")
CONTEXT = (
    "Paper: the number printed in the paper this project implements. In brackets, with the network it is about: "
    "another architecture or input size than ours, shown for context and not as a comparison."
)


@dataclass(frozen=True)
class TracedRun:
    """A run with how its weights were trained: the strategy, and how many extra passes per image it takes.

    Where no training is known, `strategy` is None and `first` says how the first run with these weights is called.
    """

    run: StoredCertification
    first: str
    strategy: str | None = None
    passes: int | None = None
    doubt: str | None = None

    @property
    def label(self) -> str:
        return self.strategy or f"{self.first} †"

    @property
    def certified(self) -> Rate:
        return self.run.rates["certified"]

    @property
    def defense_words(self) -> str:
        return f"{self.run.defense} ({self.run.guarantee})"

    @cached_property
    def paper(self) -> list[PaperNumber]:
        return paper_numbers(self.run, self.strategy)


def trace(runs: Sequence[StoredCertification], trainings: Sequence[StoredTraining]) -> list[TracedRun]:
    """For each run the training whose checkpoint has its weights, else the one that its settings name."""
    trained, firsts, found = cache(_trained), dict[str, str](), []
    for run in runs:
        first = firsts.setdefault(run.weights_sha256 or run.name, run.name)
        weights = f" `{printable(run.weights)}`" if run.weights else ""
        doubt = f"no training is known for its weights{weights}; it goes by a folder's name"
        traced = TracedRun(run, first, doubt=doubt)
        for checkpoint, named in find_weights(run, trainings):
            training, sha256 = trained(checkpoint)
            if training is None:
                continue
            if sha256 == run.weights_sha256 is not None:
                traced = TracedRun(run, first, training.strategy, training.search_passes)
                break
            if named and traced.strategy is None:
                doubt = (
                    f"it is shown as `{training.strategy}`, the strategy of the training around "
                    f"{printable(str(checkpoint))}, but the weights there are gone or not those of the run"
                )
                traced = TracedRun(run, first, training.strategy, training.search_passes, doubt)
        found.append(traced)
    return found


def _trained(checkpoint: Path) -> tuple[StoredTraining | None, str | None]:
    """The training around a checkpoint, and the sha256 of its weights; of weights that are gone, what was noted."""
    try:
        training = read_run(checkpoint.parent) if (checkpoint.parent / "manifest.json").is_file() else None
    except (PatchproofError, OSError):
        return None, None
    if not isinstance(training, StoredTraining):
        return None, None
    try:
        return training, checkpoint_sha256(checkpoint)
    except (PatchproofError, OSError):
        return training, training.weights_sha256 if checkpoint.name == "checkpoint-last" else None


@dataclass(frozen=True)
class PaperNumber:
    """Percentages of the paper; `context` says what differs from our run, None for the same architecture."""

    certified: float
    defended: float | None
    context: str | None


def paper_numbers(run: StoredCertification, strategy: str | None) -> list[PaperNumber]:
    """The paper's cell with the data set, strategy, masks and patch of this run; where the architecture is none of the
    paper's, those of its three families, as context."""
    size, dataset = run.image_size, run.dataset
    if strategy is None or run.native or run.defense != "patchcleanser" or size is None:
        return []
    if dataset.startswith("imagenette"):  # its folders are called imagenette2, imagenette2-320 and imagenette2-160
        dataset = "imagenette"
    name = run.architecture.lower()
    own = [family for family, (_, beginnings) in FAMILIES.items() if name.startswith(beginnings)]
    found = []
    for family in own or FAMILIES:
        recipe = recipes().get(f"{dataset}-{family}-{strategy}")
        different = [FAMILIES[family][0]] if run.architecture.split(".")[0] != ARCHITECTURES[family].model else []
        different += ["224×224"] if size != PAPER_INPUT else []
        for cell in recipe.expectations if recipe else ():
            if not cell.patch.endswith("%") and size != PAPER_INPUT:
                continue  # the paper's pixels are those of 224×224
            same_masks = run.patches == 1 and run.axes == (cell.masks, cell.masks)
            if same_masks and run.patch_sizes == parse_patches(cell.patch, size):
                found.append(PaperNumber(cell.certified, cell.defended, ", ".join(different) or None))
    return found


def paper_words(numbers: Sequence[PaperNumber], name: str) -> str | None:
    """`93.7%` for the same network, `(ResNet 93.7%, ViT 95.5%)` for others."""
    known = [(number.context, getattr(number, name)) for number in numbers if getattr(number, name) is not None]
    own = [percent(value / 100) for context, value in known if context is None]
    others = ", ".join(f"{context} {percent(value / 100)}" for context, value in known)
    return own[0] if own else f"({others})" if others else None


def runs_table(traced: Sequence[TracedRun]) -> Table:
    """One row per run, with everything in which it may differ from the others."""
    rows = []
    for one in traced:
        run, made = one.run, [one.run.manifest.get(name) for name in ("date", "commit")]
        row: dict[str, Cell] = {
            "run": run.name,
            "strategy": one.label,
            "data set": run.dataset,
            "split": split_words(run),
            "architecture": run.architecture,
            "defence": run.defense,
            "guarantee": run.guarantee,
            "masks": run.masks_words,
            "patch": run.patch_words,
            "images": one.certified.n,
        }
        row |= {name: run.rates.get(name) for name in ACCURACIES}
        row["passes per image"] = sum(r.forwards for r in run.good) / len(run.good) if run.good else None
        row["seconds"] = run.seconds
        stamps = [*(None if value is None else printable(str(value)) for value in made), run.weights_sha256]
        rows.append(row | dict(zip(MADE, stamps, strict=True)))
    return Table.of("runs", "The runs", rows, _notes(traced))


def concise(table: Table, elsewhere: Sequence[str] = ()) -> Table:
    """Without the columns that are the same in every row, which become one note, and those shown `elsewhere`."""
    table = table.without(elsewhere)
    same = {
        column.name: cell_text(table.rows[0][i])
        for i, column in enumerate(table.columns)
        if column.name in COMMON and len({row[i] for row in table.rows}) == 1
    }
    if len(table.rows) < 2 or not same:
        return table
    said = ", ".join(f"{name} {text}" for name, text in same.items())
    return replace(table.without(same), notes=(f"The same for all: {said}.", *table.notes))


def paper_table(traced: Sequence[TracedRun]) -> Table:
    """Rows are strategies; each setting has columns for the defended and the certified accuracy, and the paper's.

    A second run of the same strategy in the same setting goes to a second row.
    """
    named = len({one.defense_words for one in traced}) > 1
    found: dict[tuple[str, int], dict[Column, Cell]] = {}
    known: dict[Column, bool] = {}
    for one in traced:
        run, defense = one.run, [one.defense_words] if named else []
        setting = " · ".join([run.dataset, run.architecture, *defense, run.masks_words, run.patch_words])
        cells: dict[Column, Cell] = {}
        for name in ("defended", "certified"):
            cells[Column(name, setting)] = run.rates[name]
            cells[Column(f"{name}, paper", setting)] = paper_words(one.paper, name)
        number = 1
        while not cells.keys().isdisjoint(found.setdefault((one.label, number), {})):
            number += 1
        found[one.label, number] |= cells
        known |= {column: known.get(column, False) or cell is not None for column, cell in cells.items()}
    columns, rows = [column for column, some in known.items() if some], list[tuple[Cell, ...]]()
    for label, number in sorted(found, key=lambda row: (*strategy_order(row[0]), row[1])):
        name = label if number == 1 else f"{label} (run {number})"
        rows.append((name, *map(found[label, number].get, columns)))
    notes = (*_notes(traced), *((CONTEXT,) if any(one.paper for one in traced) else ()))
    return Table("comparison", "Defended and certified accuracy", [Column("strategy"), *columns], rows, notes)


def strategy_order(label: str) -> tuple[int, str]:
    """Strategies in the paper's order, then the rest by name."""
    known = list(STRATEGIES)
    return known.index(label) if label in known else len(known), label


def _notes(traced: Sequence[TracedRun]) -> tuple[str, ...]:
    unknown = any(one.strategy is None for one in traced)
    about = f"Rates with exact 95% intervals; {guarantee_note(one.run for one in traced)}"
    return (about, NO_NAME) if unknown else (about,)


def comparison_table(comparisons: Sequence[Comparison], names: Iterable[str]) -> Table:
    """One row per run and accuracy: the images on which it differs from the baseline, and what follows."""
    base, several = comparisons[0].base.name, len(comparisons) > 1
    tested = [(c, name) for name in names for c in comparisons if name in c.accuracies]
    rows: list[dict[str, Cell]] = [
        {"run": c.run.name, "accuracy": name, **_paired_cells(c.accuracies[name], c.corrected[name])}
        for c, name in tested
    ]
    notes = [
        f"Gained: only this run has the image right or certified; lost: only {base}. The difference, this run minus "
        f"{base}, is over the same images, with Newcombe's 95% interval (method 10); McNemar's test is exact.",
        *([BORDER] if any(c.accuracies[name].disagrees(c.corrected[name]) for c, name in tested) else []),
        *([HOLM] if several else []),
    ]
    title = f"Against {base}" if several else f"{comparisons[0].run.name} against {base}"
    return Table.of("paired", title, rows, notes, digits=3, leave_out=() if several else ("run", "p, Holm"))


def class_comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Certified accuracy of each class against the baseline, smallest p first."""
    rows: list[tuple[float, dict[str, Cell]]] = []
    for c in comparisons:
        adjusted = holm([paired.p for paired in c.classes.values()])
        for (label, paired), p in zip(c.classes.items(), adjusted, strict=True):
            cells = {"class": c.base.class_name(label), "run": c.run.name, **_paired_cells(paired, p)}
            rows.append((paired.p, cells))
    ordered = [cells for _, cells in sorted(rows, key=lambda row: row[0])]
    title, alone = f"Certified against {comparisons[0].base.name}, by class", len(comparisons) == 1
    return Table.of("paired-classes", title, ordered, [HOLM], digits=3, leave_out=("run",) if alone else ())


def _paired_cells(paired: Paired, corrected: float) -> dict[str, Cell]:
    counts = {"images": paired.n, "gained": paired.gained, "lost": paired.lost}
    return {**counts, "difference in points": paired, "McNemar p": paired.p, "p, Holm": corrected}


def mixed_notices(traced: Sequence[TracedRun]) -> list[str]:
    """Why the runs are not directly comparable."""
    runs, notices = [one.run for one in traced], []
    if len({run.guarantee for run in runs}) > 1:
        names = {kind: [run.name for run in runs if run.guarantee == kind] for kind in ("detection", "recovery")}
        named = ", ".join(f"{kind} ({shortened(', '.join(found), 60)})" for kind, found in names.items())
        notices.append(f"mixed: {named}; certified detection and certified recovery are not comparable")
    if len({run.data_sha256 for run in runs}) > 1:
        sets = ", ".join(sorted({run.dataset for run in runs}))
        return [*notices, f"mixed: the runs are not about the same images ({sets}); compare only within a data set"]
    if len({frozenset(record.index for record in run.good) for run in runs}) > 1:
        counts = ", ".join(sorted({f"{one.certified.n:,}" for one in traced}))
        notices.append(f"mixed: the runs cover different images of the same data set (n = {counts})")
    if len({run.native for run in runs}) > 1:
        notices.append("mixed: some patches are measured on the original image, others at the network input")
    return notices
