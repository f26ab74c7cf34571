"""Numbers counted from the records of runs: by outcome, class and mask, under attack, and for two runs on the same
images; and the training behind a run's weights.

Two runs on the same images share most of what makes their separate intervals wide. Their difference comes from the
images on which they differ: those `gained` only by the second run and those `lost` only by the first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from scipy.special import bdtr

from patchproof.geometry import parse_patches
from patchproof.models import checkpoint_sha256
from patchproof.recipes import ARCHITECTURES, Expectation, recipes
from patchproof.runs import (
    ATTACK_ACCURACIES,
    Rate,
    Record,
    StoredCertification,
    StoredTraining,
    Tally,
    find_weights,
    read_run,
)
from patchproof.types import PatchproofError, Size

GUARANTEES = {
    "recovery": "the right label under any such patch",
    "detection": "the right label or an alarm under any such patch",
}
NAMED = 3
"""Most classes, runs or masks that a sentence or cell names."""

MOST_CLASSES = 40
"""Most classes that a figure names; of more classes it has those at either end."""

FEW_PER_CLASS = 5
"""Fewest images per class, on average, for which results of many classes are shown by class."""

PAPER_INPUT: Size = (224, 224)
PAPER_NETWORKS = {"resnet": "ResNet", "vit": "ViT", "convnext": "ConvNeXt"}

LABEL = attrgetter("label")

Z = 1.959963984540054
"""Normal quantile of a two-sided 95% interval."""

POWER = 0.8416212335729143
"""Normal quantile of 80%: a difference is found four times in five."""


@dataclass(frozen=True)
class TracedRun:
    """A run with the strategy that its weights were trained with, and the extra passes per image of that strategy.

    If no training is known, `strategy` is None and `first` is the name of the first run with these weights.
    """

    run: StoredCertification
    first: str
    strategy: str | None = None
    passes: int | None = None

    @property
    def label(self) -> str:
        return self.strategy or f"{self.first} †"

    @property
    def certified(self) -> Rate:
        return self.run.rates["certified"]

    @cached_property
    def paper(self) -> dict[str, Expectation]:
        """The paper's cells for the data set, strategy, masks and patch of this run: network -> cell. The one of our
        network at the paper's input size is alone, and called ""."""
        run, size, found = self.run, self.run.image_size, dict[str, Expectation]()
        if self.strategy is None or run.native or run.defense != "patchcleanser" or size is None or run.patches != 1:
            return {}
        # The folders of imagenette are called imagenette2, imagenette2-320 and imagenette2-160.
        dataset = "imagenette" if run.dataset.startswith("imagenette") else run.dataset
        for family, name in PAPER_NETWORKS.items():
            recipe = recipes().get(f"{dataset}-{family}-{self.strategy}")
            for cell in recipe.expectations if recipe else ():
                same_pixels = size == PAPER_INPUT or cell.patch.endswith("%")  # the paper's pixels are those of 224×224
                same_masks = run.axes == (cell.masks, cell.masks)
                if same_pixels and same_masks and run.patch_sizes == parse_patches(cell.patch, size):
                    if size == PAPER_INPUT and run.architecture.split(".")[0] == ARCHITECTURES[family].model:
                        return {"": cell}
                    found[name] = cell
        return found


def trace(runs: Sequence[StoredCertification], trainings: Sequence[StoredTraining]) -> list[TracedRun]:
    """Each run with the training that made its weights, if a checkpoint or its results have the same sha256."""
    around, firsts, found = cache(training_around), dict[str, str](), []
    for run in runs:
        first = firsts.setdefault(run.weights_sha256 or run.name, run.name)
        known = (around(checkpoint) for checkpoint, _ in find_weights(run, trainings))
        made = next((training for training, sha256 in known if sha256 and sha256 == run.weights_sha256), None)
        found.append(TracedRun(run, first, *((made.strategy, made.search_passes) if made else ())))
    return found


def training_around(checkpoint: Path) -> tuple[StoredTraining | None, str | None]:
    """The training that wrote a checkpoint, and the sha256 of its weights, from its results if the weights are gone."""
    if not (checkpoint.parent / "manifest.json").is_file():  # most candidates: any parent of a run may be asked about
        return None, None
    with suppress(PatchproofError, OSError):
        training = read_run(checkpoint.parent)
        if isinstance(training, StoredTraining):
            with suppress(PatchproofError, OSError):
                return training, checkpoint_sha256(checkpoint)
            return training, training.weights_sha256 if checkpoint.name == "checkpoint-last" else None
    return None, None


def rate_note(runs: Iterable[StoredCertification]) -> str:
    """A note that says how the rates are given and what `certified` means."""
    found = sorted({run.guarantee for run in runs})
    words = "; ".join(f"certified ({guarantee}) = {GUARANTEES[guarantee]}" for guarantee in found)
    return f"Rates with exact 95% intervals; {words}."


def outcomes(run: StoredCertification) -> dict[str, list[Record]]:
    return {
        "certified": [record for record in run.good if record.certified],
        "not certified": [record for record in run.good if not record.certified],
    }


def by_class(run: StoredCertification) -> dict[int, list[Record]]:
    """The records of each label, in the order of the labels."""
    return {label: list(some) for label, some in groupby(sorted(run.good, key=LABEL), key=LABEL)}


def witness(run: StoredCertification, record: Record) -> tuple[tuple[int, ...], int | None]:
    """The numbers of the masks that decided the certificate, and the label predicted under them.

    A mask that hides two places counts as its parts. Without a witness that fits the run: no masks and None.
    """
    found = record.evidence.get("witness")
    if run.masks is None or not isinstance(found, Mapping):
        return (), None
    masks, label = found.get("masks"), found.get("label")
    if not isinstance(masks, list) or not all(type(n) is int and 0 <= n < len(run.masks) for n in masks):
        return (), None
    numbers = [run.masks.blocks.index(rect) for number in masks for rect in run.masks.parts[number]]
    return tuple(dict.fromkeys(numbers)), label if isinstance(label, int) else None


def mask_shares(run: StoredCertification, records: Sequence[Record]) -> dict[int, Rate]:
    """For each mask, the share of these images that it helped to decide; the most frequent mask first."""
    decided = [masks for record in records if (masks := witness(run, record)[0])]
    found = Counter(number for masks in decided for number in masks)
    ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    return {number: Rate(k, len(decided)) for number, k in ordered}


def mask_name(run: StoredCertification, number: int) -> str:
    """The mask's number, counted from 1 as in the explorer, and its place in the grid."""
    if run.axes is None:
        return f"mask {number + 1}"
    row, column = divmod(number, run.axes[1])  # the masks of a grid are in the order of its rows
    return f"mask {number + 1} (row {row + 1} of {run.axes[0]}, column {column + 1} of {run.axes[1]})"


def attacked_rates(run: StoredCertification) -> dict[str, Rate]:
    """The five accuracies over the records of an attack.

    An image that was not attacked counts with its clean answer, so that the rate stays an upper bound. An accuracy
    that no record knows is left out.
    """
    found = Tally(ATTACK_ACCURACIES).add(run.attacks).rates()
    for name, clean in (("undefended_attacked", "undefended"), ("attacked", "defended")):
        if found[name].n:
            answers = [r.finding(clean) if r.finding(name) is None else r.finding(name) for r in run.attacks]
            found[name] = Rate(sum(map(bool, answers)), len(answers))
    return {name: rate for name, rate in found.items() if rate.n}


@dataclass(frozen=True)
class Paired:
    """Numbers of images for which a finding holds in both runs, only the first, only the second, and neither."""

    both: int
    lost: int
    gained: int
    neither: int

    @property
    def n(self) -> int:
        return self.both + self.lost + self.gained + self.neither

    @property
    def difference(self) -> float:
        """The second rate minus the first."""
        return (self.gained - self.lost) / self.n if self.n else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval from two Wilson intervals and their correlation (Newcombe 1998, method 10)."""
        n = self.n
        if not n:
            return -1.0, 1.0
        first, second = self.both + self.lost, self.both + self.gained
        (below1, above1), (below2, above2) = wilson_reach(first, n), wilson_reach(second, n)
        product = first * (n - first) * second * (n - second)
        together: float = self.both * self.neither - self.lost * self.gained
        if together > 0:
            together = max(together - n / 2, 0)  # continuity correction
        phi = together / math.sqrt(product) if product else 0.0
        below = math.sqrt(max(0.0, below2 * below2 - 2 * phi * below2 * above1 + above1 * above1))
        above = math.sqrt(max(0.0, above2 * above2 - 2 * phi * above2 * below1 + below1 * below1))
        return max(-1.0, self.difference - below), min(1.0, self.difference + above)

    @property
    def p(self) -> float:
        """McNemar's exact test: the chance of a split at least as uneven if both runs are equally good."""
        differing = self.lost + self.gained
        return min(1.0, 2 * float(bdtr(min(self.lost, self.gained), differing, 0.5))) if differing else 1.0

    @property
    def images_needed(self) -> int | None:
        """Number of images that show a difference of this size four times in five; None if there is no difference."""
        if self.lost == self.gained:
            return None
        differing, d = (self.lost + self.gained) / self.n, abs(self.difference)
        return math.ceil(((Z * math.sqrt(differing) + POWER * math.sqrt(max(0.0, differing - d * d))) / d) ** 2)

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"n": self.n, "difference": self.difference, "interval": list(self.interval), "p": self.p}


def wilson_reach(k: int, n: int) -> tuple[float, float]:
    """Distances from k / n to the lower and the upper end of Wilson's 95% interval."""
    middle, square = 2 * k + Z * Z, Z * math.sqrt(Z * Z + 4 * k * (n - k) / n)
    scale = 2 * (n + Z * Z)
    return k / n - (middle - square) / scale, (middle + square) / scale - k / n


def count_pairs(findings: Iterable[tuple[bool | None, bool | None]]) -> Paired:
    """Count the images for which both findings are known."""
    counts = Counter(findings)
    return Paired(counts[True, True], counts[True, False], counts[False, True], counts[False, False])


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for testing all of them together (Holm 1979)."""
    adjusted, worst = [1.0] * len(values), 0.0
    for rank, number in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        worst = max(worst, min(1.0, (len(values) - rank) * values[number]))
        adjusted[number] = worst
    return adjusted


@dataclass(frozen=True)
class Comparison:
    """A run against the baseline on their common images: each accuracy, and certified accuracy by label.

    `corrected` holds Holm's p-values of the accuracies, over all runs that are compared together.
    """

    run: StoredCertification
    accuracies: Mapping[str, Paired]
    classes: Mapping[int, Paired]
    corrected: dict[str, float] = field(default_factory=dict)

    @property
    def certified(self) -> Paired:
        return self.accuracies["certified"]


def compare(base: StoredCertification, *runs: StoredCertification) -> list[Comparison]:
    """Compare each run with the baseline, image by image; `why_not_paired` must be None for all of them."""
    found = []
    for run in runs:
        others = {record.index: record for record in run.good}
        pairs = [(record, others[record.index]) for record in base.good if record.index in others]
        names = [name for name in base.rates if name in run.rates]
        accuracies = {name: count_pairs((a.finding(name), b.finding(name)) for a, b in pairs) for name in names}
        classes = {
            label: count_pairs((a.certified, others[a.index].certified) for a in some if a.index in others)
            for label, some in by_class(base).items()
        }
        found.append(Comparison(run, accuracies, {label: paired for label, paired in classes.items() if paired.n}))
    for name in base.rates:
        tested = [c for c in found if name in c.accuracies]
        for c, p in zip(tested, holm([c.accuracies[name].p for c in tested]), strict=True):
            c.corrected[name] = p
    return found


def why_not_paired(base: StoredCertification, run: StoredCertification) -> str | None:
    """Why the run claims something else than the baseline, or cannot be compared image by image; None if it can."""
    if base.guarantee != run.guarantee:
        return f"its certificates are {run.guarantee}, those of {base.name} {base.guarantee}"
    if base.threat != run.threat:
        return f"its certificates are about {run.patch_words}, those of {base.name} about {base.patch_words}"
    if base.data_sha256 is None or run.data_sha256 is None:
        return "it is not known which images it is about"
    if base.data_sha256 != run.data_sha256:
        return f"it is about other images than {base.name} (another data set, split or limit)"
    if not {record.index for record in base.good} & {record.index for record in run.good}:
        return f"no image was certified in it and in {base.name}"
    return None
