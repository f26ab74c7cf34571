"""Interval bounds as a defence (Chiang et al., ICLR 2020): the plain network, certified by what its layers can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from patchproof.defenses._base import Certificates, Guarantee, device_of, require_one_patch
from patchproof.defenses._table import BLOCK, require_labels
from patchproof.geometry import PatchThreat, all_places, inside
from patchproof.masking import Engine, default_batch, evaluating, label_range, require_classes, require_images
from patchproof.models import margin_bounds, passable_layers
from patchproof.settings import NoOptions
from patchproof.types import Classifier, InputError


@dataclass(frozen=True)
class IntervalBounds:
    """Certified(x, y) iff for every patch position p and class c ≠ y the lower bound of logit_y − logit_c is positive,
    where pixels inside p range over [0, 1] and the others are those of x.

    `predict` is the argmax of the network, computed in float64, and the bounds are float64 intervals that contain that
    computation's rounding errors by proof (`margin_bounds`): no τ is needed.
    """

    classifier: Any
    threat: PatchThreat
    engine: Engine = field(default_factory=Engine, kw_only=True)

    name: ClassVar[str] = "ibp"
    guarantee: ClassVar[Guarantee] = "recovery"
    evidence: ClassVar[Sequence[str]] = ("worst",)
    Options: ClassVar[type[Any]] = NoOptions

    def __post_init__(self) -> None:
        require_one_patch(self.name, self.threat)
        if not isinstance(self.classifier, nn.Module):
            raise InputError(f"ibp needs a network of known layers, not {type(self.classifier).__name__}")
        if self.engine.precision not in ("fp32", "auto"):
            raise InputError(f"ibp computes in float64; leave precision at fp32, not {self.engine.precision}")
        with evaluating(self.classifier):
            list(passable_layers(self.classifier))

    @classmethod
    def of(cls, classifier: Classifier, threat: PatchThreat, *, engine: Engine) -> IntervalBounds:
        return cls(classifier, threat, engine=engine)

    @property
    def images_at_once(self) -> int:
        """Images, or images times positions, whose bounds are computed together."""
        if self.engine.batch_size != "auto":
            return self.engine.batch_size
        return max(1, default_batch(self.threat.image_size, device_of(self)) // 4)

    @property
    def most_passes(self) -> int:
        """Patch positions."""
        return len(all_places(self.threat))

    @property
    def fewest_passes(self) -> int:
        """Of an image that fails at once."""
        return min(BLOCK, self.most_passes)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "guarantee": self.guarantee,
            "image_size": list(self.threat.image_size),
            "patch_sizes": [list(size) for size in self.threat.patch_sizes],
            "arithmetic": "float64 intervals",
        }

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """argmax F(x), in float64."""
        require_images(images, self.threat.image_size)
        return torch.cat([self._logits(part).argmax(dim=1) for part in images.split(self.images_at_once)])

    @torch.no_grad()
    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates:
        """Bounds at every position, giving up on an image after a block of positions with a bound that is not positive.
        Blocks double, as those of masked copies do: what an image takes does not change with the batch it came in.

        A pass carries bounds from the pixels to the margins, for about twice the cost of a forward pass. `worst` is
        the position and the other class with the smallest bound of those computed.
        """
        require_images(images, self.threat.image_size)
        require_labels(labels, len(images))
        labels = labels.to(images.device)
        parts = zip(images.split(self.images_at_once), labels.split(self.images_at_once), strict=True)
        found = [self._certified(*part) for part in parts]
        bound, forwards, place, label = (torch.cat(values) for values in zip(*found, strict=True))
        return Certificates(bound > 0, bound.float(), forwards, {"worst.place": place, "worst.label": label})

    def _certified(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Smallest bound, passes, and the position and class it was found at, for images that fit into one pass."""
        places = self._central_first().to(images.device)
        bound = torch.full((len(images),), torch.inf, dtype=torch.float64, device=images.device)
        forwards, label = torch.zeros_like(labels), torch.zeros_like(labels)
        place = places.new_zeros(len(images), 4)
        start, block = 0, BLOCK
        while start < len(places) and len(alive := torch.nonzero(bound > 0)[:, 0]):
            some = places[start : start + block]
            parts = some.split(max(1, self.images_at_once // len(alive)))
            margins = torch.cat([self._bounds(images[alive], labels[alive], part) for part in parts], dim=1)
            worst, at = margins.flatten(1).min(dim=1)
            better = ~(worst >= bound[alive])  # a bound that is no number proves nothing
            rows, at = alive[better], at[better]
            bound[rows], label[rows] = worst[better], at % margins.shape[2]
            place[rows] = some[at // margins.shape[2]]
            forwards[alive] += len(some)
            start, block = start + block, 2 * block
        return bound, forwards, place, label

    def _bounds(self, images: Tensor, labels: Tensor, places: Int64[Tensor, "p 4"]) -> Float[Tensor, "b p classes"]:
        """Lower bounds of logit_y − logit_c with a patch at each of these places; ∞ for c = y."""
        patch, exact = inside(places, self.threat.image_size), images.double()[:, None]
        lower, upper = (torch.where(patch, value, exact).flatten(0, 1) for value in (0.0, 1.0))
        about = labels.repeat_interleave(len(places))
        with evaluating(self.classifier):
            require_classes(label_range(labels), self._logits(images[:1]).shape[1])
            bounds = margin_bounds(self.classifier, lower, upper, about)
        return bounds.scatter(1, about[:, None], torch.inf).unflatten(0, (len(images), len(places)))

    def _logits(self, images: Tensor) -> Float[Tensor, "b classes"]:
        tensors = {**dict(self.classifier.named_parameters()), **dict(self.classifier.named_buffers())}
        exact = {name: value.double() for name, value in tensors.items() if value.is_floating_point()}
        with evaluating(self.classifier):
            return torch.func.functional_call(self.classifier, exact, (images.double(),))

    def _central_first(self) -> Int64[Tensor, "p 4"]:
        """Every position, those first that are likely to fail: a central patch hides the object more often."""
        places = all_places(self.threat)
        middle = 2 * places[:, :2] + places[:, 2:] - torch.tensor(self.threat.image_size)
        return places[middle.abs().sum(dim=1).argsort(stable=True)]
