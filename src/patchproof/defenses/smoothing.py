"""Ablation smoothing: many views that each show a band of the image, of which a patch touches only a few.

A view votes for classes; the prediction is the class with the most votes, and a certificate counts the votes that a
patch cannot reach. Views wrap around the image. The views that a patch touches are counted, because the published
formula Δ = ⌈(w + b − 1)/s⌉ of smoothed ViTs is one too small at the left edge if s does not divide the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.defenses._base import Certificates, EvaluatedDefense
from patchproof.defenses._objectives import StolenVotes
from patchproof.defenses._rules import Evidence, EvidenceDefense, RobustMasking
from patchproof.geometry import Fields, PatchThreat, Windows
from patchproof.masking import Copies, Engine, Measured, Objective
from patchproof.settings import Ablation, Certificate, PatchGuardSmoothingOptions, SmoothedViTOptions, SmoothingOptions
from patchproof.types import Classifier


@dataclass(frozen=True)
class Smoothing(EvaluatedDefense, EvidenceDefense):
    """Base class: a view shows a band of columns or rows, or a block, `band` pixels wide, and hides the rest."""

    classifier: Classifier
    threat: PatchThreat
    ablation: Ablation = field(default="column", kw_only=True)
    band: int = field(default=4, kw_only=True)
    engine: Engine = field(default_factory=Engine, kw_only=True)
    views: Fields = field(init=False, repr=False, compare=False)

    evidence: ClassVar[Sequence[str]] = ("votes", "worst")
    margin_unit: ClassVar[str] = "votes"
    parts: ClassVar[tuple[str, str]] = "views", "a smaller band"
    stride = 1
    """Pixels between the starts of neighbouring views."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "views", Fields.bands(self.threat.image_size, self.ablation, self.band, self.stride))

    @property
    def occlusions(self) -> Fields:
        return self.views

    @cached_property
    def windows(self) -> Windows:
        return self.views.touched_by(self.threat)

    @property
    def tau(self) -> float:
        """τ in float32; 0 if none has been measured, which is enough to predict."""
        engine = self.evaluator.engine
        return engine.tau_fp32 if isinstance(engine, Measured) else 0.0

    @property
    def most_passes(self) -> int:
        return len(self.views)

    @property
    def images_at_once(self) -> int:
        return max(1, 4 * self.chunk // len(self.views))

    def describe(self) -> dict[str, Any]:
        views = f"{len(self.views)} of {self.ablation} {self.band}, every {self.stride}"
        return super().describe() | {"views": views, **self.arithmetic()}

    def prove(self, evidence: Evidence, labels: Int64[Tensor, " b"]) -> Certificates:
        proof = super().prove(evidence, labels)
        return replace(proof, evidence={**self.counted(evidence, labels), **proof.evidence})

    def counted(self, evidence: Evidence, labels: Int64[Tensor, " b"]) -> dict[str, Tensor]:
        """The number of votes for the label, and the most votes for any other class."""
        votes = evidence.found.sum(dim=2).long()
        rest = votes.scatter(1, labels[:, None], -1)
        return {"votes.label": votes.gather(1, labels[:, None])[:, 0], "votes.runner_up": rest.amax(dim=1)}

    def copies(self, images: Float[Tensor, "b c h w"]) -> Copies:
        """All views of all images."""
        image, view = torch.cartesian_prod(torch.arange(len(images)), torch.arange(len(self.views))).unbind(dim=1)
        return Copies(image, view, view)

    def objectives(self) -> Sequence[Objective]:
        return (StolenVotes(self.views, getattr(self, "threshold", None)),)


@dataclass(frozen=True)
class ThresholdVotes(Smoothing):
    """Base class: a view votes for every class whose probability is at least `threshold`, so for several or none."""

    threshold: float = field(default=0.3, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_precision("votes in float32")
        if not isinstance(self.engine, Measured):
            object.__setattr__(self, "engine", replace(self.engine, precision="fp32", compile=False))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"threshold": self.threshold}

    def gather(self, images: Float[Tensor, "b c h w"]) -> Evidence:
        """Count votes in float32; a vote is uncertain if the log-odds of its class are too close to the threshold's.

        Too close means within τ and the rounding of a softmax.
        """
        self.evaluator.refresh()
        odds = log(self.threshold / (1 - self.threshold))
        close = self.tau + 16 * torch.finfo(torch.float32).eps / (1 - self.threshold)

        def read(logits: Tensor, _rows: Tensor | slice) -> Tensor:
            probability = logits.softmax(dim=1)
            cast = probability >= self.threshold
            lead = logits.log_softmax(dim=1) - torch.log1p(-probability) - odds
            return torch.stack([cast, cast & (lead >= close), cast | ~(lead <= -close)], dim=1)

        keep = self.views.keep(images.device)
        found = self.evaluator.evaluate(images, keep, self.copies(images), read, precision="fp32")
        passes = torch.full((len(images),), len(self.views), device=images.device)
        cast, low, high = found.unflatten(0, (len(images), len(self.views))).permute(2, 0, 3, 1).double()
        return Evidence(cast, low, high, self.windows.to(images.device), passes)


@dataclass(frozen=True)
class CountingVotes(Smoothing):
    """Base class for certificates that count votes: Levine & Feizi's, and the exact one.

    With n the votes and n∖p the votes outside A(p), for all classes c ≠ y:
    - `count`: n_y ≥ n_c + 2Δ + 1[c < y], where Δ = max_p |A(p)|;
    - `exact`: n∖p_y ≥ n∖p_c + |A(p)| + 1[c < y] for every patch p.

    Both verdicts are in the evidence; `certificate` names the one that decides.
    """

    certificate: Certificate = field(default="count", kw_only=True)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"certificate": self.certificate}

    def prove(self, evidence: Evidence, labels: Int64[Tensor, " b"]) -> Certificates:
        # A tie goes to the smaller label, so y needs 1 − 1[c < y] votes less than a lead of more than 0.
        spare = (torch.arange(evidence.found.shape[1], device=labels.device) >= labels[:, None]).double()[:, :, None]
        ours = evidence.of_label(labels).sum(dim=2, keepdim=True)
        theirs = evidence.high.sum(dim=2, keepdim=True)
        delta = int(evidence.windows.sizes.max())
        count = self.certificates(ours - theirs - 2 * delta + spare, evidence, labels)
        exact = self.certificates(self.lead(evidence, labels) + spare, evidence, labels)
        verdicts = {"votes.count": count.certified, "votes.exact": exact.certified}
        shown = {**self.counted(evidence, labels), **verdicts, **exact.evidence}
        return replace(count if self.certificate == "count" else exact, evidence=shown)


@dataclass(frozen=True)
class DerandomizedSmoothing(CountingVotes, ThresholdVotes):
    """De-randomized smoothing (Levine & Feizi, NeurIPS 2020): one view for every column (row, pixel)."""

    name: ClassVar[str] = "derandomized-smoothing"
    Options: ClassVar[type[Any]] = SmoothingOptions


@dataclass(frozen=True)
class SmoothedViT(CountingVotes):
    """Smoothed ViT (Salman et al., CVPR 2022): a view every `stride` pixels, with one vote per view, for its argmax.

    It is meant for a ViT whose `masked` drops the tokens that are wholly hidden.
    """

    band: int = field(default=19, kw_only=True)
    stride: int = field(default=10, kw_only=True)

    name: ClassVar[str] = "smoothed-vit"
    Options: ClassVar[type[Any]] = SmoothedViTOptions

    def gather(self, images: Float[Tensor, "b c h w"]) -> Evidence:
        """Count one vote per view; a view whose margin is below τ in float32 may vote for any class."""
        self.evaluator.refresh()
        found = self.evaluator.answers(images, self.views.keep(images.device), self.copies(images))
        sure = (found.gap >= self.tau) & found.gap.isfinite()
        shape = (len(images), len(self.views))
        label, sure, passes = (v.unflatten(0, shape).to(images.device) for v in (found.label, sure, found.passes))
        classes = getattr(self.classifier, "num_classes", None)
        if classes is None:
            classes = self.evaluator.evaluate(images[:1], None, Copies.unmasked(1), lambda logits, _: logits).shape[1]
        votes, sure = torch.nn.functional.one_hot(label, int(classes)).bool(), sure[:, :, None]
        cast, low, high = (v.transpose(1, 2).double() for v in (votes, votes & sure, votes | ~sure))
        return Evidence(cast, low, high, self.windows.to(images.device), passes.sum(dim=1))


@dataclass(frozen=True)
class PatchGuardSmoothing(RobustMasking, ThresholdVotes):
    """Robust masking of the votes of de-randomized smoothing (PatchGuard; Xiang et al., USENIX Security 2021)."""

    name: ClassVar[str] = "patchguard-smoothing"
    Options: ClassVar[type[Any]] = PatchGuardSmoothingOptions
