"""The paper's number beside ours: same data set, strategy, masks and patch; another architecture's only as context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from patchproof.geometry import square_side
from patchproof.recipes import ARCHITECTURES, Expectation, recipes
from patchproof.report._facts import Facts
from patchproof.types import Size

PAPER_INPUT: Size = (224, 224)
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "resnet": ("resnet", "resnext", "wide_resnet"),
    "vit": ("vit", "deit"),
    "convnext": ("convnext",),
}
WORDS = {"resnet": "ResNet", "vit": "ViT", "convnext": "ConvNeXt"}


@dataclass(frozen=True)
class PaperNumber:
    """Percentages of the paper; `context` says what differs from our run, None for the same architecture."""

    table: str
    certified: float
    defended: float | None
    context: str | None


def paper_numbers(facts: Facts, strategy: str | None) -> list[PaperNumber]:
    """The paper's cell for this run; where the architecture is none of the paper's, those of its three families."""
    if strategy is None or facts.native or facts.masks is None or facts.axes is None or facts.axes[0] != facts.axes[1]:
        return []
    return [number for family in _families(facts.architecture) for number in _cell(facts, strategy, family)]


def _cell(facts: Facts, strategy: str, family: str) -> list[PaperNumber]:
    recipe = recipes().get(f"{paper_dataset(facts.dataset)}-{family}-{strategy}")
    found = [e for e in recipe.expectations if _same_setting(e, facts)] if recipe else []
    context = _difference(facts, family)
    return [PaperNumber(e.table, e.certified, e.defended, context) for e in found]


def paper_dataset(name: str) -> str:
    """ImageNette comes in folders called imagenette2, imagenette2-320 and imagenette2-160."""
    return "imagenette" if name.startswith("imagenette") else name


def _same_setting(expected: Expectation, facts: Facts) -> bool:
    assert facts.masks is not None
    side = patch_side(expected.patch, facts.masks.image_size)
    return facts.axes == (expected.masks, expected.masks) and facts.patch_sizes == ((side, side),)


def patch_side(patch: str, image_size: Size) -> int | None:
    """In pixels of an image of this size; the paper's pixels are those of 224×224 alone."""
    if patch.endswith("%"):
        return square_side(float(patch.removesuffix("%")), image_size)
    return int(patch.removesuffix("px")) if image_size == PAPER_INPUT else None


def _families(architecture: str) -> list[str]:
    """The paper's family that the architecture belongs to; all three if it belongs to none."""
    name = architecture.lower()
    own = [family for family, starts in FAMILIES.items() if name.startswith(starts)]
    return own or list(FAMILIES)


def _difference(facts: Facts, family: str) -> str | None:
    """What of the network is not the paper's, in words; None when nothing is."""
    assert facts.masks is not None
    parts = []
    if facts.architecture.split(".")[0] != ARCHITECTURES[family].model:
        parts.append(WORDS[family])
    if facts.masks.image_size != PAPER_INPUT:
        parts.append("224×224")
    return ", ".join(parts) or None
