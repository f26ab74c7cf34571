"""The training behind the weights of a certification, and the paper's numbers for such a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from patchproof.geometry import parse_patches
from patchproof.models import checkpoint_sha256
from patchproof.recipes import ARCHITECTURES, Expectation, recipes
from patchproof.runs import Rate, StoredCertification, StoredTraining, find_weights, read_run
from patchproof.types import PatchproofError, Size, printable

GUARANTEES = {
    "recovery": "the right label under any such patch",
    "detection": "the right label or an alarm under any such patch",
}
NAMED = 3
"""Most classes, runs or masks that a sentence or cell names."""

PAPER_INPUT: Size = (224, 224)
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "resnet": ("ResNet", ("resnet", "resnext", "wide_resnet")),
    "vit": ("ViT", ("vit", "deit")),
    "convnext": ("ConvNeXt", ("convnext",)),
}
"""The paper's families of networks: their names, and the beginnings of timm's names for their members."""


def rate_note(runs: Iterable[StoredCertification]) -> str:
    """A note that says how the rates are given and what `certified` means."""
    found = sorted({run.guarantee for run in runs})
    words = "; ".join(f"certified ({guarantee}) = {GUARANTEES[guarantee]}" for guarantee in found)
    return f"Rates with exact 95% intervals; {words}."


def split_words(run: StoredCertification) -> str:
    return printable(str(run.manifest["data"].get("split") or "not named"))


@dataclass(frozen=True)
class TracedRun:
    """A run with the strategy that its weights were trained with, and the extra passes per image of that strategy.

    If no training is known, `strategy` is None and `first` is the name of the first run with these weights.
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
        """The paper's numbers for the data set, strategy, masks and patch of this run, each with what differs from our
        network, or None if nothing does. If the architecture is not the paper's, those of its three families."""
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


def trace(runs: Sequence[StoredCertification], trainings: Sequence[StoredTraining]) -> list[TracedRun]:
    """Find the training of each run: the one whose checkpoint has its weights, else the one that its settings name."""
    around, firsts, found = cache(training_around), dict[str, str](), []
    for run in runs:
        first = firsts.setdefault(run.weights_sha256 or run.name, run.name)
        weights = f" `{printable(run.weights)}`" if run.weights else ""
        traced = TracedRun(run, first, doubt=f"no training is known for its weights{weights}")
        for checkpoint, named in find_weights(run, trainings):
            training, sha256 = around(checkpoint)
            if training is None:
                continue
            if sha256 is not None and sha256 == run.weights_sha256:
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
