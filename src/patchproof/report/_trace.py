"""How the weights of certifications were trained, what the paper says of such networks, and short names for runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from patchproof.geometry import parse_patches
from patchproof.models import checkpoint_sha256
from patchproof.recipes import ARCHITECTURES, Expectation, recipes
from patchproof.runs import Rate, StoredCertification, StoredTraining, read_run
from patchproof.runs._reading import find_weights, printable
from patchproof.types import PatchproofError, Size

GUARANTEES = {
    "recovery": "the right label under any such patch",
    "detection": "the right label or an alarm under any such patch",
}
NAMED = 3
"""Classes, runs or masks that a sentence or cell names."""

LONG_NAME = 30
"""Letters of a run's name that fit into headings, labels and sentences."""

PAPER_INPUT: Size = (224, 224)
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "resnet": ("ResNet", ("resnet", "resnext", "wide_resnet")),
    "vit": ("ViT", ("vit", "deit")),
    "convnext": ("ConvNeXt", ("convnext",)),
}
"""The paper's families: their names, and how timm's names of their members begin."""


def rate_note(runs: Iterable[StoredCertification]) -> str:
    """What the rates of these runs are, and what `certified` means."""
    found = sorted({run.guarantee for run in runs})
    words = "; ".join(f"certified ({guarantee}) = {GUARANTEES[guarantee]}" for guarantee in found)
    return f"Rates with exact 95% intervals; {words}."


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
        """The paper's cell with the data set, strategy, masks and patch of this run; where the architecture is none of
        the paper's, those of its three families. Before each what differs from our run, None for the same network."""
        run, size, dataset, found = self.run, self.run.image_size, self.run.dataset, []
        if self.strategy is None or run.native or run.defense != "patchcleanser" or size is None or run.patches != 1:
            return []
        if dataset.startswith("imagenette"):  # its folders are called imagenette2, imagenette2-320 and imagenette2-160
            dataset = "imagenette"
        own = [family for family, (_, names) in FAMILIES.items() if run.architecture.lower().startswith(names)]
        for family in own or FAMILIES:
            recipe = recipes().get(f"{dataset}-{family}-{self.strategy}")
            different = [FAMILIES[family][0]] if run.architecture.split(".")[0] != ARCHITECTURES[family].model else []
            different += ["224×224"] if size != PAPER_INPUT else []
            for cell in recipe.expectations if recipe else ():
                same_pixels = size == PAPER_INPUT or cell.patch.endswith("%")  # the paper's pixels are those of 224×224
                same_masks = run.axes == (cell.masks, cell.masks)
                if same_pixels and same_masks and run.patch_sizes == parse_patches(cell.patch, size):
                    found.append((", ".join(different) or None, cell))
        return found


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
