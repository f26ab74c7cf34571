"""Defences on local evidence: cells with a small receptive field, of which a patch touches only a few.

The classifier has `local_logits(images)` "b classes rows columns" and `receptive_field` = (size, stride, offset): cell
(r, q) sees the pixels from offset + r·stride on, `size` of them, and the like for columns. Local logits are computed in
float64, so that rounding stays far below `ROUNDING`; the rules hold for logits that are off by that much.
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
from patchproof.models import failure, fingerprint
from patchproof.settings import BagCertOptions
from patchproof.types import CheckError, Classifier, InputError, PatchproofError, Size

ROUNDING = 1e-6
"""What float64 local logits are assumed to be off by, as a share of the largest |logit|: rounding is a millionth of
it. Leads must exceed this share of one cell's evidence, too."""

PROBED_CELLS = 16
"""Cells whose receptive field is tried, by changing everything outside it."""


class Exact:
    """The classifier's local logits in float64, on a copy that follows its weights however they are changed."""

    def __init__(self, classifier: Any) -> None:
        self.classifier, self.copied, self.checked = classifier, (None, classifier), False

    @property
    def receptive_field(self) -> tuple[int, int, int]:
        field = self.classifier.receptive_field
        try:
            size, stride, offset = map(operator.index, field)
        except (TypeError, ValueError):
            raise InputError(
                f"receptive_field must be (size, stride, offset) in whole pixels, e.g. (9, 1, -4), not {field!r}"
            ) from None
        return size, stride, offset

    def local_logits(self, images: Tensor, at_once: int = 1) -> Tensor:
        network: Any = self.copied[1]
        if isinstance(self.classifier, nn.Module):
            now = fingerprint(self.classifier)
            if self.copied[0] != now:
                network = copy.deepcopy(self.classifier).double()
                self.copied, self.checked = (now, network), False  # type: ignore[assignment]
            with torch.no_grad():  # a change through `.data` leaves no trace
                for ours, theirs in zip(_tensors(network), _tensors(self.classifier), strict=True):
                    ours.copy_(theirs)
        try:
            with torch.no_grad(), evaluating(network):
                parts = [network.local_logits(part) for part in images.double().split(at_once)]
        except Exception as error:
            if isinstance(error, PatchproofError) or out_of_memory(error):
                raise
            shape = tuple(images.shape[1:])
            raise CheckError(f"local_logits fails on float64 images of {shape}: {failure(error)}") from error
        for logits in parts:
            if not (isinstance(logits, Tensor) and logits.ndim == 4):
                got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise CheckError(f"local_logits must return (images, classes, rows, columns), not {got}")
        return torch.cat(parts).double()

    def check_fields(self, images: Tensor, logits: Tensor, image_size: Size) -> None:
        """Refuse a receptive field that is not what it says: change all pixels outside it and compare, once."""
        if self.checked or not len(images):
            return
        grid = (int(logits.shape[2]), int(logits.shape[3]))
        keep = Fields.receptive(image_size, grid, self.receptive_field).keep(images.device)
        noise = torch.rand(images[:1].shape, generator=torch.Generator().manual_seed(0)).to(images)
        for cell in torch.linspace(0, len(keep) - 1, PROBED_CELLS).long().unique().tolist():
            row, column = divmod(cell, grid[1])
            other = self.local_logits(torch.where(keep[cell], images[:1], noise))[0, :, row, column]
            change = float((other - logits[0, :, row, column]).abs().max())
            if change > ROUNDING * float(logits[0].abs().max().clamp(min=1)):
                raise CheckError(
                    f"the receptive field {self.receptive_field} (size, stride, offset) is not what "
                    f"the network has: pixels outside it change the logits of cell ({row}, {column}) by {change:.3g}"
                )
        self.checked = True


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


@dataclass(frozen=True)
class LocalDefense(EvidenceDefense):
    """Common ground: evidence from local logits, windows from the receptive field, leads from a rule."""

    classifier: Classifier
    threat: PatchThreat
    engine: Engine = field(default_factory=Engine, kw_only=True)
    exact: Exact = field(init=False, repr=False, compare=False)

    most_passes: ClassVar[int] = 1
    margin_unit: ClassVar[str] = "scores"
    above: ClassVar[float] = ROUNDING
    nested: ClassVar[bool] = False
    """Does the rule ask about windows inside others, too?"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not hasattr(self.classifier, "local_logits") or not hasattr(self.classifier, "receptive_field"):
            kind = getattr(self.classifier, "architecture", type(self.classifier).__name__)
            raise InputError(
                f"{self.name} needs a classifier with `local_logits` and `receptive_field`, which {kind} lacks; "
                "the recipe cifar10-32px-bagcert trains a BagNet"
            )
        self.require_precision("computes in float64")
        object.__setattr__(self, "exact", Exact(self.classifier))
        assert self.exact.receptive_field  # refused here if it is none

    def describe(self) -> dict[str, Any]:
        field = list(self.exact.receptive_field)
        return super().describe() | {"receptive_field": field, "arithmetic": "float64"}

    def local_evidence(self, logits: Float[Tensor, "b classes n"]) -> Float[Tensor, "b classes n"]:
        """e(l), which may not fall where l rises."""
        raise NotImplementedError

    def soft_evidence(self, logits: Float[Tensor, "b classes n"]) -> Float[Tensor, "b classes n"]:
        """The same with a slope that an attack can climb."""
        return self.local_evidence(logits)

    def gather(self, images: Float[Tensor, "b c h w"]) -> Evidence:
        """From one pass per image, in float64."""
        logits = self.exact.local_logits(images, self.images_at_once)
        self.exact.check_fields(images, logits, self.threat.image_size)
        cells, passes = logits.flatten(2), torch.ones(len(images), dtype=torch.int64, device=images.device)
        off = ROUNDING * cells.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1)
        found, low, high = map(self.local_evidence, (cells, cells - off, cells + off))
        return Evidence(found, low, high, self.windows(logits), passes)

    def windows(self, logits: Float[Tensor, "b classes rows columns"]) -> Windows:
        grid = (int(logits.shape[2]), int(logits.shape[3]))
        return receptive_windows(self.threat, grid, self.exact.receptive_field, logits.device, nested=self.nested)

    def surrogate(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The scores with gradients, for attacks."""
        local: Tensor = self.classifier.local_logits(images)  # type: ignore[attr-defined]
        return self.scores(self.soft_evidence(local.flatten(2).float()), self.windows(local))


@dataclass(frozen=True)
class ClippedBagNet(LocalDefense):
    """e = tanh(0.05·l − 1) ∈ (−1, 1), the answer is the argmax of its sum over cells (Zhang et al. 2020).

    Certified iff Σ_{∉A} e_y − |A| > Σ_{∉A} e_c + |A| for every patch and class.
    """

    name: ClassVar[str] = "clipped-bagnet"
    least: ClassVar[float] = -1

    def local_evidence(self, logits: Tensor) -> Tensor:
        return torch.tanh(0.05 * logits - 1)


@dataclass(frozen=True)
class PatchGuardBagNet(RobustMasking, LocalDefense):
    """e = max(l, 0), each class without its most evident window: robust masking (Xiang et al. 2021)."""

    name: ClassVar[str] = "patchguard-bagnet"
    nested: ClassVar[bool] = True

    def local_evidence(self, logits: Tensor) -> Tensor:
        return logits.relu()


@dataclass(frozen=True)
class BagCert(LocalDefense):
    """Local scores in [0, 1], the answer is the argmax of their sum (Metzen & Yatsura 2021).

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
        return logits.sigmoid()
