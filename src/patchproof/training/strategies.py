"""Masking strategies: which masked copies of a batch a classifier is trained on (the paper's §4.1).

A strategy only chooses; `loop.py` applies what it chose. This file has their names and what they have in common.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry import MaskSet, PatchThreat, covering_masks
from patchproof.masking import Engine, label_range, require_classes
from patchproof.training.search import Greedy, Grid, Gutout, MultiSizeGreedy, Searcher
from patchproof.training.unguided import Cutout, NoMasks, RandomMasks
from patchproof.types import Classifier, InputError, Size

TRAINING_PERCENT = 3.0
"""The paper trains with the masks of the 3% patch (100 and 69 pixels at 224), whatever patch it certifies."""

MaskPair = tuple[MaskSet, MaskSet]
"""A coarse and a fine mask set: 3×3 and 6×6 in the paper."""


@runtime_checkable
class MaskingStrategy(Protocol):
    """Looks at a batch and the current classifier, and says what stays visible in each copy to train on."""

    @property
    def forwards(self) -> int:
        """Extra forward passes an image."""
        ...

    @property
    def backwards(self) -> int:
        """Extra backward passes an image."""
        ...

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]: ...


def training_masks(image_size: Size) -> MaskPair:
    """The 3×3 and 6×6 sets of the 3% patch at this size: 100 and 69 pixels at 224, 12 and 8 at 28."""
    threat = PatchThreat.square(image_size=image_size, percent=TRAINING_PERCENT)
    return covering_masks(threat, per_axis=3), covering_masks(threat, per_axis=6)


def masking_strategy(
    name: str,
    *,
    image_size: Size,
    generator: torch.Generator,
    masks: MaskPair | None = None,
    engine: Engine | None = None,
) -> MaskingStrategy:
    """The strategy of that name (`STRATEGIES`); all its randomness comes from `generator`."""
    require_strategy(name)
    pair = masks or training_masks(image_size)
    if any(m.image_size != image_size for m in pair):
        raise InputError(f"the masks are for images of {[m.image_size for m in pair]}, not {image_size}")
    ingredients = Ingredients(image_size, pair, generator, Searcher(engine or Engine()))
    return Checked(STRATEGIES[name].build(ingredients), image_size)


def require_strategy(name: str) -> None:
    """Refuse an unknown name, naming the nearest known one."""
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(STRATEGIES)}"
        raise InputError(f"unknown masking strategy `{name}`; {hint}")


@dataclass(frozen=True)
class Ingredients:
    """What a strategy can be made of."""

    image_size: Size
    masks: MaskPair
    generator: torch.Generator
    searcher: Searcher


@dataclass(frozen=True)
class Checked:
    """Any strategy, its input and its answer checked: images of the right size, a bool for each pixel of each copy."""

    strategy: MaskingStrategy
    image_size: Size

    @property
    def forwards(self) -> int:
        return self.strategy.forwards

    @property
    def backwards(self) -> int:
        return self.strategy.backwards

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        size = tuple(images.shape[-2:])
        if size != self.image_size:
            raise InputError(f"the images are {size}, the strategy is for {self.image_size}")
        classes = getattr(classifier, "num_classes", None)
        if isinstance(classes, int):
            require_classes(label_range(labels), classes)
        keep = self.strategy(classifier, images, labels)
        if keep.dtype != torch.bool or keep.shape[1:] != (len(images), 1, *self.image_size):
            raise InputError(
                f"a strategy must return booleans of shape (copies, {len(images)}, 1, h, w), not {keep.shape}"
            )
        return keep


@dataclass(frozen=True)
class Both:
    """The copies of two strategies together."""

    strategies: tuple[MaskingStrategy, MaskingStrategy]

    @property
    def forwards(self) -> int:
        return sum(strategy.forwards for strategy in self.strategies)

    @property
    def backwards(self) -> int:
        return sum(strategy.backwards for strategy in self.strategies)

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        return torch.cat([strategy(classifier, images, labels) for strategy in self.strategies])


@dataclass(frozen=True)
class Entry:
    """A strategy by name: what it does in words, and how it is made."""

    words: str
    build: Callable[[Ingredients], MaskingStrategy]


def _random(masks: MaskSet, of: Ingredients) -> RandomMasks:
    return RandomMasks(masks, of.generator)


STRATEGIES: dict[str, Entry] = {
    "none": Entry("the images as they are", lambda of: NoMasks(of.image_size)),
    "cutout": Entry("two squares of 128/224 of the side, anywhere", lambda of: Cutout(of.image_size, of.generator)),
    "rand3x3": Entry("two random 3×3 masks", lambda of: _random(of.masks[0], of)),
    "rand6x6": Entry("two random 6×6 masks", lambda of: _random(of.masks[1], of)),
    "rand": Entry(
        "a copy of rand3x3 and one of rand6x6", lambda of: Both((_random(of.masks[0], of), _random(of.masks[1], of)))
    ),
    "gutout3x3": Entry("the two most salient 3×3 masks (Grad-CAM)", lambda of: Gutout(of.masks[0])),
    "gutout6x6": Entry("the two most salient 6×6 masks (Grad-CAM)", lambda of: Gutout(of.masks[1])),
    "gutout": Entry(
        "a copy of gutout3x3 and one of gutout6x6", lambda of: Both((Gutout(of.masks[0]), Gutout(of.masks[1])))
    ),
    "greedy3x3": Entry("the worst 3×3 mask, then the worst second one", lambda of: Greedy(of.masks[0], of.searcher)),
    "greedy6x6": Entry("the worst 6×6 mask, then the worst second one", lambda of: Greedy(of.masks[1], of.searcher)),
    "greedy": Entry(
        "multi-size greedy: 3×3 narrowing down 6×6 (Algorithm A1)", lambda of: MultiSizeGreedy(*of.masks, of.searcher)
    ),
    "grid3x3": Entry("the worst of all pairs of 3×3 masks", lambda of: Grid(of.masks[0], of.searcher)),
    "grid6x6": Entry("the worst of all pairs of 6×6 masks", lambda of: Grid(of.masks[1], of.searcher)),
}
