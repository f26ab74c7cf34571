"""What an attacker sees of a defence: views of an image, and ways to fail that can be climbed by gradient.

A defence lists its own ways to fail (`objectives()`), so attacks need not know any defence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry import mass_inside
from patchproof.types import Size


@dataclass(frozen=True)
class Views:
    """View u of an image hides the masks `first[u]` and `second[u]`; the last view, `whole`, hides nothing."""

    keep: Bool[Tensor, "m 1 h w"]
    first: Int64[Tensor, " u"]
    second: Int64[Tensor, " u"]

    @classmethod
    def of(cls, masks: Bool[Tensor, "n 1 h w"], first: Int64[Tensor, " u"], second: Int64[Tensor, " u"]) -> Views:
        """Return the views of these pairs of masks and of the whole image."""
        whole, last = masks.new_ones(1, *masks.shape[1:]), torch.tensor([len(masks)])
        first, second = (torch.cat([numbers, last]).to(masks.device) for numbers in (first, second))
        return cls(torch.cat([masks, whole]), first, second)

    @property
    def whole(self) -> int:
        return len(self.first) - 1

    @property
    def masks(self) -> Bool[Tensor, "n 1 h w"]:
        return self.keep[:-1]

    def shown(self, view: Int64[Tensor, " v"]) -> Bool[Tensor, "v 1 h w"]:
        """Return the pixels that each view shows (True)."""
        return self.keep[self.first[view]] & self.keep[self.second[view]]


@dataclass(frozen=True)
class Aim:
    """What the loss of candidate j reads: copies in the views `view[j]`, where `used`, and a wrong label to aim at."""

    view: Int64[Tensor, "j k"]
    used: Bool[Tensor, "j k"]
    wrong: Int64[Tensor, " j"]

    def __getitem__(self, rows: Tensor) -> Aim:
        return Aim(self.view[rows], self.used[rows], self.wrong[rows])

    @property
    def passes(self) -> Int64[Tensor, " j"]:
        return self.used.sum(dim=1)


@dataclass(frozen=True)
class CleanAnswers:
    """The clean images as the attacker knows them: `logits[b, u]` is F of view u of image b."""

    views: Views
    labels: Int64[Tensor, " b"]
    logits: Float[Tensor, "b u classes"]

    def __getitem__(self, rows: Tensor) -> CleanAnswers:
        return CleanAnswers(self.views, self.labels[rows], self.logits[rows])

    def shows(self, places: Int64[Tensor, "b *k 4"]) -> Bool[Tensor, "b u"]:
        """True for the views that show a part of the patch (or of either of two)."""
        every = torch.arange(len(self.views.first), device=self.views.first.device)
        # Two patches have tens of thousands of views, whose pixels would not fit into memory together.
        found = [mass_inside(self.views.shown(some)[:, 0].float(), places) for some in every.split(1024)]
        return torch.cat(found).T > 0.5


class Objective(ABC):
    """A way to fail: the views that must change, a loss over them, and the locations where that can work."""

    @abstractmethod
    def views(self, image_size: Size, device: torch.device) -> Views:
        """Return the views of an image that the objective reads."""

    @abstractmethod
    def aim(self, clean: CleanAnswers, places: Int64[Tensor, "b *k 4"], attempt: Int64[Tensor, " b"]) -> Aim:
        """Return the copies to change in each image with a patch at this location; later attempts may choose others."""

    @abstractmethod
    def loss(self, logits: Float[Tensor, "j k classes"], labels: Int64[Tensor, " j"], aim: Aim) -> Float[Tensor, " j"]:
        """Return a value for each candidate; larger is worse for the defender."""

    def salient_views(self, views: Views) -> Int64[Tensor, " v"]:
        """Return the views whose input gradient ranks the locations of a patch; by default, the whole image."""
        return torch.tensor([views.whole], device=views.first.device)

    def promising(self, clean: CleanAnswers, hides: Bool[Tensor, "p n"]) -> Bool[Tensor, "b p"]:
        """True for the locations to try first: there the clean image's answers leave this failure open."""
        return hides.new_zeros(len(clean.labels), len(hides))
