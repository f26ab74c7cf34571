"""Several certifications side by side: how their weights were trained, and the paper's numbers beside ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from patchproof.defenses import DEFENSES
from patchproof.geometry import parse_patches
from patchproof.models import checkpoint_sha256
from patchproof.recipes import ARCHITECTURES, Expectation, recipes
from patchproof.report._tables import Cell, Column, Table, percent
from patchproof.runs import ACCURACIES, Rate, StoredCertification, StoredTraining, read_run
from patchproof.runs._reading import find_weights, printable, shortened
from patchproof.training import STRATEGIES
from patchproof.types import PatchproofError, Size

GUARANTEES = {
    "recovery": "the right label under any such patch",
    "detection": "the right label or an alarm under any such patch",
}
LONG_NAME = 30
"""Letters of a run's name that fit into headings, labels and sentences."""

PAPER_INPUT: Size = (224, 224)
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "resnet": ("ResNet", ("resnet", "resnext", "wide_resnet")),
    "vit": ("ViT", ("vit", "deit")),
    "convnext": ("ConvNeXt", ("convnext",)),
}
"""The paper's families: their names, and how timm's names of their members begin."""

NO_NAME = "† The training strategy is not known: the name is that of the folder of the first run with these weights."
CONTEXT = (
    "Paper: the number printed in the paper this project implements. In brackets, with the network it is about: "
    "another architecture or input size than ours, shown for context and not as a comparison."
)
MADE = ("date", "commit", "sha256 of the weights")
"""In the files of the runs' table, not on the page."""


def rate_note(runs: Iterable[StoredCertification]) -> str:
    """What the rates of these runs are, and what `certified` means."""
    found = sorted({run.guarantee for run in runs})
    words = "; ".join(f"certified ({guarantee}) = {GUARANTEES[guarantee]}" for guarantee in found)
    return f"Rates with exact 95% intervals; {words}."


def validated_with(run: StoredTraining) -> tuple[str, str]:
    """The defence that certified the validation images, in words, and its guarantee."""
    name = str(run.manifest["identity"]["plan"].get("validate_with") or "patchcleanser")
    words = "double masking with 3×3 masks" if name == "patchcleanser" else printable(name)
    return words, DEFENSES[name].kind.guarantee if name in DEFENSES else "unknown guarantee"


def split_words(run: StoredCertification) -> str:
    return printable(str(run.manifest["data"].get("split") or "not named"))


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
    def paper(self) -> list[tuple[str | None, Expectation]]:
        return paper_numbers(self.run, self.strategy)


def shortly_named(
    certified: Sequence[StoredCertification], trained: Sequence[StoredTraining]
) -> tuple[list[StoredCertification], list[StoredTraining]]:
    """Long names of several certifications, or trainings, without the words that they all share, but the first."""
    names, short = list[str](), list[str]()
    for found in ([run.name for run in certified], [run.name for run in trained]):
        words = [re.findall(r"[^-/]+[-/]?|[-/]", name) for name in found]
        common = set.intersection(*({word.rstrip("-/") for word in one} for one in words)) if len(words) > 1 else set()
        kept = [[first, *(word for word in rest if word.rstrip("-/") not in common)] for first, *rest in words]
        names += found
        short += ["".join(one).rstrip("-/") for one in kept]
    if max(map(len, names)) <= LONG_NAME or len(set(short)) < len(names):
        short = names
    count = len(certified)
    return (
        [replace(run, name=name) for run, name in zip(certified, short[:count], strict=True)],
        [replace(run, name=name) for run, name in zip(trained, short[count:], strict=True)],
    )


def trace(runs: Sequence[StoredCertification], trainings: Sequence[StoredTraining]) -> list[TracedRun]:
    """For each run the training whose checkpoint has its weights, else the one that its settings name."""

    @cache
    def trained(checkpoint: Path) -> tuple[StoredTraining | None, str | None]:
        """The training around a checkpoint, and the sha256 of its weights; of weights that are gone, what was noted."""
        training = None
        try:
            if (checkpoint.parent / "manifest.json").is_file():
                training = read_run(checkpoint.parent)
            if isinstance(training, StoredTraining):
                return training, checkpoint_sha256(checkpoint)
        except (PatchproofError, OSError):
            if isinstance(training, StoredTraining):
                return training, training.weights_sha256 if checkpoint.name == "checkpoint-last" else None
        return None, None

    firsts, found = dict[str, str](), []
    for run in runs:
        first = firsts.setdefault(run.weights_sha256 or run.name, run.name)
        weights = f" `{printable(run.weights)}`" if run.weights else ""
        doubt = f"no training is known for its weights{weights}; it goes by a folder's name"
        traced = TracedRun(run, first, doubt=doubt)
        for checkpoint, named in find_weights(run, trainings):
            training, sha256 = trained(checkpoint)
            if training is not None and sha256 == run.weights_sha256 is not None:
                traced = TracedRun(run, first, training.strategy, training.search_passes)
                break
            if training is not None and named and traced.strategy is None:
                doubt = (
                    f"it is shown as `{training.strategy}`, the strategy of the training around "
                    f"{printable(str(checkpoint))}, but the weights there are gone or not those of the run"
                )
                traced = TracedRun(run, first, training.strategy, training.search_passes, doubt)
        found.append(traced)
    return found


def paper_numbers(run: StoredCertification, strategy: str | None) -> list[tuple[str | None, Expectation]]:
    """The paper's cell with the data set, strategy, masks and patch of this run; where the architecture is none of the
    paper's, those of its three families. Before each what differs from our run, None for the same architecture."""
    size, dataset = run.image_size, run.dataset
    if strategy is None or run.native or run.defense != "patchcleanser" or size is None or run.patches != 1:
        return []
    if dataset.startswith("imagenette"):  # its folders are called imagenette2, imagenette2-320 and imagenette2-160
        dataset = "imagenette"
    name, found = run.architecture.lower(), []
    own = [family for family, (_, beginnings) in FAMILIES.items() if name.startswith(beginnings)]
    for family in own or FAMILIES:
        recipe = recipes().get(f"{dataset}-{family}-{strategy}")
        different = [FAMILIES[family][0]] if run.architecture.split(".")[0] != ARCHITECTURES[family].model else []
        different += ["224×224"] if size != PAPER_INPUT else []
        for cell in recipe.expectations if recipe else ():
            same_pixels = size == PAPER_INPUT or cell.patch.endswith("%")  # the paper's pixels are those of 224×224
            same_masks = run.axes == (cell.masks, cell.masks)
            if same_pixels and same_masks and run.patch_sizes == parse_patches(cell.patch, size):
                found.append((", ".join(different) or None, cell))
    return found


def paper_words(numbers: Sequence[tuple[str | None, Expectation]], name: str) -> str | None:
    """`93.7%` for the same network, `(ResNet 93.7%, ViT 95.5%)` for others."""
    known = [(context, percent(n / 100)) for context, cell in numbers if (n := getattr(cell, name)) is not None]
    own = [words for context, words in known if context is None]
    others = ", ".join(f"{context} {words}" for context, words in known)
    return own[0] if own else f"({others})" if others else None


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
            cells[Column(f"{name}, paper", setting)] = paper_words(one.paper, name)
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
