"""Interval bound propagation as a defence (Chiang et al., ICLR 2020): the plain network, certified layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from patchproof.defenses._base import Certificates, OwnDefense, device_of, require_labels
from patchproof.defenses._table import BLOCK
from patchproof.geometry import PatchThreat
from patchproof.masking import Engine, evaluating, explained, label_range, require_classes, require_images
from patchproof.models import margin_bounds, passable_layers
from patchproof.types import InputError

TOGETHER = 4
"""Positions per axis that are bounded together at first."""


@dataclass(frozen=True)
class IntervalBounds(OwnDefense):
    """Certified(x, y) iff for every patch position p and class c ≠ y the lower bound of logit_y − logit_c is positive,
    where pixels inside p range over [0, 1] and the others are those of x.

    `predict` is the argmax of the network in float64. The bounds are float64 intervals that provably contain the
    rounding errors of that computation (`margin_bounds`), so no τ is needed. Neighbouring positions are bounded
    together if that suffices. Such a part is (first row, first column, rows, columns, height and width of the patch).
    """

    classifier: Any
    threat: PatchThreat
    engine: Engine = field(default_factory=Engine, kw_only=True)

    name: ClassVar[str] = "ibp"
    evidence: ClassVar[Sequence[str]] = ("worst",)
    margin_unit: ClassVar[str] = "bound"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.classifier, nn.Module):
            raise InputError(f"ibp needs a network of known layers, not {type(self.classifier).__name__}")
        self.require_precision("computes in float64")
        with evaluating(self.classifier):
            passable_layers(self.classifier)

    @cached_property
    def most_passes(self) -> int:
        """Most passes per image: one for every part, down to single positions."""
        parts, count = self.parts, 0
        while len(parts):
            count += len(parts)
            parts = quarters(parts[(parts[:, 2:4] > 1).any(dim=1)])
            parts = parts[(parts[:, 2:4] > 0).all(dim=1)]
        return count

    @property
    def fewest_passes(self) -> int:
        """Fewest passes per image, if it fails at once."""
        return min(BLOCK, len(self.parts))

    @property
    def images_at_once(self) -> int:
        """Images per batch; fewer on a slow CPU, for early records."""
        slow = device_of(self).type == "cpu" and self.engine.batch_size == "auto"
        return max(1, super().images_at_once // 16) if slow else super().images_at_once

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"guarantee": self.guarantee, "arithmetic": "float64 intervals"}

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """Return argmax F(x), computed in float64."""
        require_images(images, self.threat.image_size)
        return torch.cat([self._logits(part).argmax(dim=1) for part in images.split(self.images_at_once)])

    @torch.no_grad()
    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates:
        """Certify with windows that hold several patches, and cut a window into four if its bound is not positive.

        A positive bound on a window proves every patch inside it. An image fails if a single position has no positive
        bound. The most doubtful windows of each image come first, in blocks that double, so the passes of an image are
        independent of the rest of the batch. A pass carries the bounds of one window from the pixels to the margins.
        `worst` is the deciding window of smallest bound, with the other class; if the image fails, that
        window is a single position.
        """
        require_images(images, self.threat.image_size)
        require_labels(labels, len(images))
        labels, count, device = labels.to(images.device), len(images), images.device
        require_classes(label_range(labels), self._logits(images[:1]).shape[1])
        bound = torch.full((count,), torch.inf, dtype=torch.float64, device=device)
        forwards, rival, place = torch.zeros_like(labels), torch.zeros_like(labels), labels.new_zeros(count, 4)
        # A queue of open parts: the image, the part, and its rank, or the bound of the part that it was cut from.
        image = torch.arange(count, device=device).repeat_interleave(len(self.parts))
        parts = self.parts.to(device).repeat(count, 1)
        rank = torch.arange(len(self.parts), device=device).double().repeat(count)
        block, at_once = BLOCK, super().images_at_once
        while len(image):
            order = by_image(image, rank)
            image, parts, rank = image[order], parts[order], rank[order]
            # Bound the next block of each image.
            now = torch.arange(len(image), device=device) - torch.searchsorted(image, image) < block
            rows, tried, windows = image[now], parts[now], windows_of(parts[now])
            chunks = zip(rows.split(at_once), windows.split(at_once), strict=True)
            found = [self._bounds(images, labels, some, window) for some, window in chunks]
            least, other = (torch.cat(values) for values in zip(*found, strict=True))
            touched, passes = rows.unique_consecutive(return_counts=True)
            forwards[touched] += passes
            # Keep the smallest bound of each image among those that decide, and where it is.
            proven, single = least > 0, (tried[:, 2:4] == 1).all(dim=1)
            decisive = least.where(proven | single, torch.inf)
            at = by_image(rows, decisive)[passes.cumsum(dim=0) - passes]
            at = at[decisive[at] < bound[touched]]
            bound[rows[at]], rival[rows[at]], place[rows[at]] = decisive[at], other[at], windows[at]
            # Cut the windows that decide nothing, and drop the images that have failed.
            cut = ~proven & ~single
            image = torch.cat([image[~now], rows[cut].repeat(4)])
            parts = torch.cat([parts[~now], quarters(tried[cut])])
            rank = torch.cat([rank[~now], least[cut].repeat(4)])
            left = (bound[image] > 0) & (parts[:, 2:4] > 0).all(dim=1)
            image, parts, rank = image[left], parts[left], rank[left]
            block *= 2
        return Certificates(bound > 0, bound.float(), forwards, {"worst.place": place, "worst.label": rival})

    @cached_property
    def parts(self) -> Int64[Tensor, "n 6"]:
        """The parts to begin with: a few central positions alone, then all positions in squares of `TOGETHER`.

        Central ones come first, because a patch hides the object more often there.
        """
        singles, squares = [], []
        for height, width in self.threat.patch_sizes:
            rows, columns = self.threat.image_size[0] - height + 1, self.threat.image_size[1] - width + 1
            singles += [(r, c, 1, 1, height, width) for r in range(rows) for c in range(columns)]
            squares += [
                (r, c, min(TOGETHER, rows - r), min(TOGETHER, columns - c), height, width)
                for r in range(0, rows, TOGETHER)
                for c in range(0, columns, TOGETHER)
            ]

        def central_first(positions: Sequence[tuple[int, ...]]) -> Tensor:
            parts = torch.tensor(positions)
            windows = windows_of(parts)
            middle = 2 * windows[:, :2] + windows[:, 2:] - torch.tensor(self.threat.image_size)
            return parts[middle.abs().sum(dim=1).argsort(stable=True)]

        return torch.cat([central_first(singles)[:BLOCK], central_first(squares)])

    def _bounds(
        self, images: Tensor, labels: Tensor, rows: Int64[Tensor, " n"], windows: Int64[Tensor, "n 4"]
    ) -> tuple[Float[Tensor, " n"], Int64[Tensor, " n"]]:
        """The smallest lower bound of logit_y − logit_c over c ≠ y for any pixels in a window of each row, and that c.

        A bound that is NaN becomes −∞, which proves nothing.
        """
        these, owner = rows.unique(return_inverse=True)
        labels = labels[rows]
        with evaluating(self.classifier):
            bounds = margin_bounds(self.classifier, images[these].double(), labels, owner, windows)
        bounds = bounds.nan_to_num(-torch.inf, torch.inf, -torch.inf).scatter(1, labels[:, None], torch.inf)
        least, other = bounds.min(dim=1)
        return least, other

    def _logits(self, images: Tensor) -> Float[Tensor, "b classes"]:
        tensors = {**dict(self.classifier.named_parameters()), **dict(self.classifier.named_buffers())}
        exact = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
        with evaluating(self.classifier), explained(images):
            return torch.func.functional_call(self.classifier, exact, (images.double(),))


def by_image(image: Int64[Tensor, " n"], value: Float[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """Indices that sort rows by image, and the rows of each image by value."""
    order = value.argsort(stable=True)
    return order[image[order].argsort(stable=True)]


def windows_of(parts: Int64[Tensor, "n 6"]) -> Int64[Tensor, "n 4"]:
    """The rectangle (top, left, height, width) that holds all patches of each part."""
    return torch.cat([parts[:, :2], parts[:, 2:4] + parts[:, 4:] - 1], dim=1)


def quarters(parts: Int64[Tensor, "n 6"]) -> Int64[Tensor, "4*n 6"]:
    """Cut each part in two on both axes, all first quarters first; a part one position wide leaves empty ones."""
    start, size, patch = parts.split(2, dim=1)
    half = (size + 1) // 2
    found = []
    for second in torch.tensor([(0, 0), (0, 1), (1, 0), (1, 1)], device=parts.device):
        found.append(torch.cat([start + second * half, torch.where(second.bool(), size - half, half), patch], dim=1))
    return torch.cat(found)
