"""Masking strategies: which masked copies of a batch a classifier is trained on."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.types import Classifier, InputError, Size

CUTOUT_SHARE = 128 / 224
"""Side of a Cutout square as a share of the image's side (PatchCleanser: 128 at 224)."""

STRATEGIES = {
    "none": "the images as they are: what a defence without training certifies",
    "cutout": "two squares of 128/224 of the side, centred anywhere, partly outside perhaps (PC-Cutout)",
}


class MaskingStrategy(Protocol):
    """Looks at a batch and the current classifier, and says what stays visible in each copy to train on."""

    passes: int
    """Extra forward passes an image."""

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, "b"]
    ) -> Bool[Tensor, "copies b 1 h w"]: ...


def masking_strategy(name: str, *, image_size: Size, generator: torch.Generator) -> MaskingStrategy:
    """The strategy of that name for images of this size; all its randomness comes from `generator`."""
    if name == "none":
        return NoMasks(image_size)
    if name == "cutout":
        return Cutout(image_size, generator)
    near = difflib.get_close_matches(name, STRATEGIES, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(STRATEGIES)}"
    raise InputError(f"unknown masking strategy `{name}`; {hint}")


@dataclass(frozen=True)
class NoMasks:
    """Everything stays visible."""

    image_size: Size
    passes: int = 0

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, "b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        return torch.ones(1, len(images), 1, *self.image_size, dtype=torch.bool, device=images.device)


@dataclass(frozen=True)
class Cutout:
    """Two squares of 128×128 (at 224), each centred on a pixel drawn uniformly; they may leave the image."""

    image_size: Size
    generator: torch.Generator
    squares: int = 2
    passes: int = 0

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, "b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        rows = self._hidden(len(images), self.image_size[0])
        columns = self._hidden(len(images), self.image_size[1])
        hidden = (rows[..., :, None] & columns[..., None, :]).any(dim=0)
        return ~hidden[None, :, None].to(images.device)

    def _hidden(self, count: int, length: int) -> Bool[Tensor, "squares b n"]:
        """Which pixels of one axis each square hides: [centre − side//2, … + side)."""
        side = round(CUTOUT_SHARE * length)
        centre = torch.randint(length, (self.squares, count, 1), generator=self.generator)
        offset = torch.arange(length) - (centre - side // 2)
        return (offset >= 0) & (offset < side)
