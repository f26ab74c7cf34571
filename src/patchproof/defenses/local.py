"""Defences on local evidence: cells with a small receptive field, of which a patch touches only a few.

The classifier has `local_logits(images)` "b classes rows columns" and `receptive_field` = (size, stride, offset): cell
(r, q) sees `size` rows of pixels from row offset + r·stride on, and columns likewise. Local logits are computed in
float64, so that rounding errors stay far below `ROUNDING`, and the rules hold for logits that are off by that much.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from patchproof.defenses._rules import Evidence, EvidenceDefense, RobustMasking
from patchproof.geometry import Fields, PatchThreat, Windows, receptive_windows
from patchproof.masking import Engine, evaluating, out_of_memory
from patchproof.models import fingerprint
from patchproof.settings import BagCertOptions
from patchproof.types import CheckError, Classifier, InputError, PatchproofError, Size, failure, kind_of

ROUNDING = 1e-6
"""Assumed error of float64 local logits, as a share of the largest |logit|; the true one is a millionth of it.

Leads must also exceed this share of one cell's evidence."""

LARGEST = 1e30
"""Local logits beyond ±LARGEST count as that large: a patch may make them infinite, and sums must stay finite."""


class ExactLogits:
    """The classifier's local logits in float64, from a copy that follows its weights however they are changed."""

    def __init__(self, classifier: Any) -> None:
        self.classifier = self.network = classifier
        self.copied_at: object = None
        self.checked = False
        field = classifier.receptive_field
        try:
            size, stride, offset = map(operator.index, field)
        except (TypeError, ValueError):
            raise InputError(
                f"receptive_field must be (size, stride, offset) in whole pixels, e.g. (9, 1, -4), not {field!r}"
            ) from None
        self.receptive_field = size, stride, offset

    def local_logits(self, images: Tensor, at_once: int = 1) -> Tensor:
        if isinstance(self.classifier, nn.Module):
            self.follow_weights(self.classifier)
        try:
            with torch.no_grad(), evaluating(self.network):
                parts = [self.network.local_logits(part) for part in images.double().split(at_once)]
        except Exception as error:
            if isinstance(error, PatchproofError) or out_of_memory(error):
                raise
            shape = tuple(images.shape[1:])
            raise CheckError(f"local_logits fails on float64 images of {shape}: {failure(error)}") from error
        for logits in parts:
            if not (isinstance(logits, Tensor) and logits.ndim == 4):
                raise CheckError(f"local_logits must return (images, classes, rows, columns), not {kind_of(logits)}")
        return torch.cat(parts).double()

    def follow_weights(self, module: nn.Module) -> None:
        now = fingerprint(module)
        if self.copied_at != now:
            self.network, self.copied_at, self.checked = copy.deepcopy(module).double(), now, False
        ours, theirs = ([*each.parameters(), *each.buffers()] for each in (self.network, module))
        with torch.no_grad():  # the fingerprint does not see changes through `.data`
            for copied, original in zip(ours, theirs, strict=True):
                copied.copy_(original)

    def check_fields(self, images: Tensor, logits: Tensor, image_size: Size) -> None:
        """Refuse a false receptive field: pixels outside those of 16 cells are changed, and must not matter.

        For each cell an image gets noise outside its field, a black image becomes white there, and a white one black.
        """
        if self.checked or not len(images):
            return
        grid = (int(logits.shape[2]), int(logits.shape[3]))
        keep = Fields.receptive(image_size, grid, self.receptive_field).keep(images.device)
        noise = torch.rand(images[:1].shape, generator=torch.Generator().manual_seed(0)).to(images)
        extremes = torch.cat([torch.zeros_like(noise), torch.ones_like(noise)])
        outside = torch.cat([noise, extremes.flip(0)])
        uniform = self.local_logits(extremes)
        for number, cell in enumerate(torch.linspace(0, len(keep) - 1, 16).long().unique().tolist()):
            row, column = divmod(cell, grid[1])
            one = slice(number % len(images), number % len(images) + 1)
            expected = torch.cat([logits[one], uniform])
            changed = self.local_logits(torch.where(keep[cell], torch.cat([images[one], extremes]), outside))
            change = (finite(changed) - finite(expected))[:, :, row, column].abs().amax(dim=1)
            if (change > rounding(expected.flatten(2))[:, 0, 0]).any():
                raise CheckError(
                    f"the receptive field {self.receptive_field} (size, stride, offset) is not what the network has: "
                    f"pixels outside it change the logits of cell ({row}, {column}) by {float(change.max()):.3g}"
                )
        self.checked = True


def finite(logits: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """The logits within ±LARGEST; NaN is 0, because any value will do for a cell that a patch controls."""
    return logits.nan_to_num(nan=0.0).clamp(-LARGEST, LARGEST)


def rounding(logits: Float[Tensor, "b classes n"]) -> Float[Tensor, "b 1 1"]:
    """The assumed error of each image's logits; those that are NaN or beyond ±LARGEST do not make it larger."""
    known = logits.abs() < LARGEST
    return ROUNDING * logits.where(known, 0).abs().amax(dim=(1, 2), keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class LocalDefense(EvidenceDefense):
    """Base class: evidence from local logits, windows from the receptive field, leads from a rule."""

    classifier: Classifier
    threat: PatchThreat
    engine: Engine = field(default_factory=Engine, kw_only=True)
    exact: ExactLogits = field(init=False, repr=False, compare=False)

    most_passes: ClassVar[int] = 1
    margin_unit: ClassVar[str] = "scores"
    above: ClassVar[float] = ROUNDING
    nested: ClassVar[bool] = False
    """True if the rule needs windows that lie inside others, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not hasattr(self.classifier, "local_logits") or not hasattr(self.classifier, "receptive_field"):
            kind = getattr(self.classifier, "architecture", type(self.classifier).__name__)
            raise InputError(
                f"{self.name} needs a classifier with `local_logits` and `receptive_field`, which {kind} lacks; "
                "the recipe cifar10-32px-bagcert trains a BagNet"
            )
        self.require_precision("computes in float64")
        object.__setattr__(self, "exact", ExactLogits(self.classifier))

    def describe(self) -> dict[str, Any]:
        field = list(self.exact.receptive_field)
        return super().describe() | {"receptive_field": field, "arithmetic": "float64"}

    def local_evidence(self, logits: Float[Tensor, "b classes n"]) -> Float[Tensor, "b classes n"]:
        """The evidence e(l), a monotonically increasing function of the local logits."""
        raise NotImplementedError

    def soft_evidence(self, logits: Float[Tensor, "b classes n"]) -> Float[Tensor, "b classes n"]:
        """Evidence with a gradient that an attack can climb."""
        return self.local_evidence(logits)

    def gather(self, images: Float[Tensor, "b c h w"]) -> Evidence:
        """Compute the evidence with one float64 pass per image."""
        logits = self.exact.local_logits(images, self.images_at_once)
        self.exact.check_fields(images, logits, self.threat.image_size)
        cells, passes = logits.flatten(2), torch.ones(len(images), dtype=torch.int64, device=images.device)
        known, off = cells.abs() < LARGEST, rounding(cells)  # unknown cells may have any evidence
        low, high = (cells - off).where(known, -LARGEST), (cells + off).where(known, LARGEST)
        found, low, high = map(self.local_evidence, (finite(cells), low, high))
        return Evidence(found, low, high, self.windows(logits), passes)

    def windows(self, logits: Float[Tensor, "b classes rows columns"]) -> Windows:
        grid = (int(logits.shape[2]), int(logits.shape[3]))
        return receptive_windows(self.threat, grid, self.exact.receptive_field, logits.device, nested=self.nested)

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Differentiable scores, for attacks."""
        local: Tensor = self.classifier.local_logits(images)  # type: ignore[attr-defined]
        return self.scores(self.soft_evidence(finite(local.flatten(2).float())), self.windows(local))


@dataclass(frozen=True)
class ClippedBagNet(LocalDefense):
    """Clipped BagNet (Zhang et al. 2020): e = tanh(0.05·l − 1) ∈ (−1, 1), summed over the cells.

    Certified iff Σ_{∉A} e_y − |A| > Σ_{∉A} e_c + |A| for every patch and class.
    """

    name: ClassVar[str] = "clipped-bagnet"
    least: ClassVar[float] = -1

    def local_evidence(self, logits: Tensor) -> Tensor:
        return torch.tanh(0.05 * logits - 1)


@dataclass(frozen=True)
class PatchGuardBagNet(RobustMasking, LocalDefense):
    """PatchGuard with a BagNet (Xiang et al. 2021): e = max(l, 0), scored by robust masking."""

    name: ClassVar[str] = "patchguard-bagnet"
    nested: ClassVar[bool] = True

    def local_evidence(self, logits: Tensor) -> Tensor:
        return logits.relu()


@dataclass(frozen=True)
class BagCert(LocalDefense):
    """BagCert (Metzen & Yatsura 2021): local scores in [0, 1], summed over the cells.

    Certified iff Σ_{∉A} (e_y − e_c) > |A| for every patch and class.
    """

    score: Literal["step", "sigmoid"] = field(default="step", kw_only=True)

    name: ClassVar[str] = "bagcert"
    Options: ClassVar[type[Any]] = BagCertOptions

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"score": self.score}

    def local_evidence(self, logits: Tensor) -> Tensor:
        return (logits > 0).to(logits) if self.score == "step" else logits.sigmoid()

    def soft_evidence(self, logits: Tensor) -> Tensor:
        """A sigmoid; for steps, which have no scale, as wide as the image's mean |logit|, so that few are saturated."""
        if self.score == "sigmoid":
            return logits.sigmoid()
        width = logits.detach().abs().mean(dim=(1, 2), keepdim=True)
        return (logits / width.clamp(min=torch.finfo(logits.dtype).eps)).sigmoid()
