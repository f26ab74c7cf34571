"""Masks chosen without looking at the classifier: none, Cutout's squares, random ones of a set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry import MaskSet
from patchproof.types import Classifier, Size

CUTOUT_SHARE = 128 / 224
"""Side of a Cutout square as a share of the image's side (PatchCleanser: 128 at 224)."""


@dataclass(frozen=True)
class NoMasks:
    """Everything stays visible."""

    image_size: Size
    forwards: int = 0
    backwards: int = 0

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        return torch.ones(1, len(images), 1, *self.image_size, dtype=torch.bool, device=images.device)


@dataclass(frozen=True)
class Cutout:
    """PC-Cutout: two squares of 128×128 (at 224), each centred on a pixel drawn uniformly; they may leave the image."""

    image_size: Size
    generator: torch.Generator
    squares: int = 2
    forwards: int = 0
    backwards: int = 0

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        rows, columns = (self._hidden(len(images), length).to(images.device) for length in self.image_size)
        hidden = (rows[..., :, None] & columns[..., None, :]).any(dim=0)
        return ~hidden[None, :, None]

    def _hidden(self, count: int, length: int) -> Bool[Tensor, "squares b n"]:
        """Which pixels of one axis each square hides: [centre − side//2, … + side)."""
        side = round(CUTOUT_SHARE * length)
        centre = torch.randint(length, (self.squares, count, 1), generator=self.generator)
        offset = torch.arange(length) - (centre - side // 2)
        return (offset >= 0) & (offset < side)


@dataclass(frozen=True)
class RandomMasks:
    """rand_k×k: two masks of the set, drawn independently and uniformly."""

    masks: MaskSet
    generator: torch.Generator
    forwards: int = 0
    backwards: int = 0

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        chosen = torch.randint(len(self.masks), (2, len(images)), generator=self.generator).to(images.device)
        keep = self.masks.keep(images.device)
        return (keep[chosen[0]] & keep[chosen[1]])[None]
