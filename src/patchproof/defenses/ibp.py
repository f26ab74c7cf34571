"""Interval bounds as a defence (Chiang et al., ICLR 2020): the plain network, certified by what its layers can do."""

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
from patchproof.geometry import PatchThreat, inside
from patchproof.masking import Engine, evaluating, label_range, require_classes, require_images
from patchproof.models import margin_bounds, passable_layers
from patchproof.types import InputError

TOGETHER = 4
"""Positions per axis that one window proves at first."""


@dataclass(frozen=True)
class IntervalBounds(OwnDefense):
    """Certified(x, y) iff for every patch position p and class c ≠ y the lower bound of logit_y − logit_c is positive,
    where pixels inside p range over [0, 1] and the others are those of x.

    `predict` is the argmax of the network, computed in float64, and the bounds are float64 intervals that contain that
    computation's rounding errors by proof (`margin_bounds`): no τ is needed. Positions are bounded together where that
    is enough: a part of them is (first row, first column, rows, columns, height and width of the patch).
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
            list(passable_layers(self.classifier))

    @cached_property
    def most_passes(self) -> int:
        """All parts, down to single positions."""
        parts, count = self.parts, 0
        while len(parts):
            count += len(parts)
            parts = quarters(parts[(parts[:, 2:4] > 1).any(dim=1)])
            parts = parts[(parts[:, 2:4] > 0).all(dim=1)]
        return count

    @property
    def fewest_passes(self) -> int:
        """Of an image that fails at once."""
        return min(BLOCK, len(self.parts))

    @property
    def images_at_once(self) -> int:
        """On a slow CPU few enough that records come often."""
        windows = super().images_at_once
        slow = device_of(self).type == "cpu" and self.engine.batch_size == "auto"
        return max(1, windows // 16) if slow else windows

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"guarantee": self.guarantee, "arithmetic": "float64 intervals"}

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """argmax F(x), in float64."""
        require_images(images, self.threat.image_size)
        return torch.cat([self._logits(part).argmax(dim=1) for part in images.split(self.images_at_once)])

    @torch.no_grad()
    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates:
        """A positive bound on a window proves every patch inside it. A window without one is cut into four, down to
        single positions; one of these without a positive bound, and the image is not certified.

        The most doubtful windows of each image come first, in blocks that double, as those of masked copies do: what an
        image takes does not change with the batch it came in. A pass carries bounds from the pixels to the margins, for
        about twice the cost of a forward pass. `worst` is the window of the smallest bound among those that decide, and
        the other class; of an image that fails, it is a position.
        """
        require_images(images, self.threat.image_size)
        require_labels(labels, len(images))
        labels, count, device = labels.to(images.device), len(images), images.device
        require_classes(label_range(labels), self._logits(images[:1]).shape[1])
        bound = torch.full((count,), torch.inf, dtype=torch.float64, device=device)
        forwards, rival, place = torch.zeros_like(labels), torch.zeros_like(labels), labels.new_zeros(count, 4)
        # A row for each open part of the positions: its image, the part, and a bound on what it is part of.
        image = torch.arange(count, device=device).repeat_interleave(len(self.parts))
        parts = self.parts.to(device).repeat(count, 1)
        doubt = torch.arange(len(self.parts), device=device).double().repeat(count)
        block, at_once = BLOCK, super().images_at_once
        while len(image):
            order = by_image(image, doubt)
            image, parts, doubt = image[order], parts[order], doubt[order]
            now = torch.arange(len(image), device=device) - torch.searchsorted(image, image) < block
            rows, tried, windows = image[now], parts[now], windows_of(parts[now])
            chunks = zip(rows.split(at_once), windows.split(at_once), strict=True)
            found = [self._bounds(images[some], labels[some], window) for some, window in chunks]
            least, other = (torch.cat(values) for values in zip(*found, strict=True))
            proven, single = least > 0, (tried[:, 2:4] == 1).all(dim=1)
            tries, passes = rows.unique_consecutive(return_counts=True)
            forwards[tries] += passes
            # The smallest bound of each image among those that decide, and where it is.
            decisive = least.where(proven | single, torch.inf)
            at = by_image(rows, decisive)[passes.cumsum(dim=0) - passes]
            at = at[decisive[at] < bound[tries]]
            bound[rows[at]], rival[rows[at]], place[rows[at]] = decisive[at], other[at], windows[at]
            cut = ~proven & ~single
            image = torch.cat([image[~now], rows[cut].repeat(4)])
            parts = torch.cat([parts[~now], quarters(tried[cut])])
            doubt = torch.cat([doubt[~now], least[cut].repeat(4)])
            left = (bound[image] > 0) & (parts[:, 2:4] > 0).all(dim=1)
            image, parts, doubt = image[left], parts[left], doubt[left]
            block *= 2
        return Certificates(bound > 0, bound.float(), forwards, {"worst.place": place, "worst.label": rival})

    @cached_property
    def parts(self) -> Int64[Tensor, "n 6"]:
        """What to begin with, central ones first, where a patch hides the object more often: a few positions alone, and
        all of them in squares of `TOGETHER`."""
        singles, squares = [], []
        for height, width in self.threat.patch_sizes:
            rows, columns = self.threat.image_size[0] - height + 1, self.threat.image_size[1] - width + 1
            singles += [(r, c, 1, 1, height, width) for r in range(rows) for c in range(columns)]
            squares += [
                (r, c, min(TOGETHER, rows - r), min(TOGETHER, columns - c), height, width)
                for r in range(0, rows, TOGETHER)
                for c in range(0, columns, TOGETHER)
            ]

        def central_first(parts: Tensor) -> Tensor:
            windows = windows_of(parts)
            middle = 2 * windows[:, :2] + windows[:, 2:] - torch.tensor(self.threat.image_size)
            return parts[middle.abs().sum(dim=1).argsort(stable=True)]

        return torch.cat([central_first(torch.tensor(singles))[:BLOCK], central_first(torch.tensor(squares))])

    def _bounds(
        self, images: Tensor, labels: Tensor, windows: Int64[Tensor, "b 4"]
    ) -> tuple[Float[Tensor, " b"], Int64[Tensor, " b"]]:
        """The least lower bound of logit_y − logit_c, c ≠ y, with any pixels inside the window of each image, and that
        c; −∞ where a bound is no number, which proves nothing."""
        patch, exact = inside(windows, self.threat.image_size), images.double()
        lower, upper = torch.where(patch, 0.0, exact), torch.where(patch, 1.0, exact)
        with evaluating(self.classifier):
            bounds = margin_bounds(self.classifier, lower, upper, labels).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        least, other = bounds.scatter(1, labels[:, None], torch.inf).min(dim=1)
        return least, other

    def _logits(self, images: Tensor) -> Float[Tensor, "b classes"]:
        tensors = {**dict(self.classifier.named_parameters()), **dict(self.classifier.named_buffers())}
        exact = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
        with evaluating(self.classifier):
            return torch.func.functional_call(self.classifier, exact, (images.double(),))


def by_image(image: Int64[Tensor, " n"], value: Float[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """The order of the rows by image, and of those of an image by value."""
    order = value.argsort(stable=True)
    return order[image[order].argsort(stable=True)]


def windows_of(parts: Int64[Tensor, "n 6"]) -> Int64[Tensor, "n 4"]:
    """The rectangles (top, left, height, width) that hold all patches of each part."""
    return torch.cat([parts[:, :2], parts[:, 2:4] + parts[:, 4:] - 1], dim=1)


def quarters(parts: Int64[Tensor, "n 6"]) -> Int64[Tensor, "4*n 6"]:
    """Each part cut in two on both axes, all first quarters first; some are empty where a part is one position wide."""
    start, size, patch = parts.split(2, dim=1)
    half = (size + 1) // 2
    found = []
    for second in torch.tensor([(0, 0), (0, 1), (1, 0), (1, 1)], device=parts.device):
        found.append(torch.cat([start + second * half, torch.where(second.bool(), size - half, half), patch], dim=1))
    return torch.cat(found)
