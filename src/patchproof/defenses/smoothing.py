"""Defences by ablation: many views that each show a band of the image, of which a patch touches only a few.

A view votes for classes; the answer is the class with the most votes, and a certificate counts the votes that a patch
cannot reach. Views wrap around the image. What a patch touches is counted, never computed by formula: the published
Δ = ⌈(w + b − 1)/s⌉ of smoothed ViTs is one too small at the left edge where s does not divide the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.defenses._base import (
    Assessment,
    Certificates,
    EvaluatedDefense,
    Guarantee,
    require_one_patch,
)
from patchproof.defenses._objectives import StolenVotes
from patchproof.defenses._rules import bounded_lead, certificates, counted_lead, robust_masking, robust_masking_lead
from patchproof.defenses._table import require_labels
from patchproof.geometry import Fields, PatchThreat, Windows
from patchproof.masking import Copies, Engine, Evaluator, Measured, Objective, require_images
from patchproof.settings import (
    Ablation,
    Certificate,
    PatchGuardSmoothingOptions,
    SmoothedViTOptions,
    SmoothingOptions,
)
from patchproof.types import Classifier, InputError


class Votes(NamedTuple):
    """Of every view for every class, 0 or 1: `cast` as the passes came out; `low` are those that every evaluation
    casts, `high` those that some evaluation may cast, with logits off by what τ allows. `passes` is their number."""

    cast: Float[Tensor, "b classes n"]
    low: Float[Tensor, "b classes n"]
    high: Float[Tensor, "b classes n"]
    passes: Int64[Tensor, " b"]


@dataclass(frozen=True)
class Smoothing(EvaluatedDefense):
    """Common ground: `band` columns (rows, blocks) are shown in a view, the rest is hidden."""

    classifier: Classifier
    threat: PatchThreat
    ablation: Ablation = field(default="column", kw_only=True)
    band: int = field(default=4, kw_only=True)
    engine: Engine = field(default_factory=Engine, kw_only=True)
    evaluator: Evaluator = field(init=False, repr=False, compare=False)
    views: Fields = field(init=False, repr=False, compare=False)

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee] = "recovery"
    evidence: ClassVar[Sequence[str]] = ("votes", "worst")
    Options: ClassVar[type[Any]]

    def __post_init__(self) -> None:
        require_one_patch(self.name, self.threat)
        object.__setattr__(self, "views", Fields.bands(self.threat.image_size, self.ablation, self.band, self.step))
        object.__setattr__(self, "evaluator", Evaluator(self.classifier, self.engine))

    @classmethod
    def of(cls, classifier: Classifier, threat: PatchThreat, *, engine: Engine, **options: Any) -> Any:
        return cls(classifier, threat, engine=engine, **options)

    @property
    def step(self) -> int:
        """Pixels from one view to the next."""
        return 1

    @property
    def occlusions(self) -> Fields:
        return self.views

    @cached_property
    def windows(self) -> Windows:
        return self.views.touched_by(self.threat)

    @property
    def most_passes(self) -> int:
        return len(self.views)

    @property
    def images_at_once(self) -> int:
        return max(1, 4 * self.chunk // len(self.views))

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "image_size": list(self.threat.image_size),
            "patch_sizes": [list(size) for size in self.threat.patch_sizes],
            "views": f"{len(self.views)} of {self.ablation} {self.band}, every {self.step}",
            **self.arithmetic(),
        }

    def votes(self, images: Float[Tensor, "b c h w"]) -> Votes:
        raise NotImplementedError

    def scores(self, votes: Float[Tensor, "b classes n"]) -> Float[Tensor, "b classes"]:
        """What the answer is the argmax of."""
        return votes.sum(dim=2)

    def prove(self, votes: Votes, labels: Int64[Tensor, " b"]) -> Certificates:
        raise NotImplementedError

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """The class with the most votes; among equals the smallest."""
        require_images(images, self.threat.image_size)
        return self.scores(self.votes(images).cast).argmax(dim=1)

    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates:
        return self.assess(images, labels).certificates

    def assess(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> Assessment:
        """Predict and certify from the same votes."""
        require_images(images, self.threat.image_size)
        self.measure(images)
        votes = self.votes(images)
        predictions = self.scores(votes.cast).argmax(dim=1)
        asked = predictions if labels is None else labels.to(images.device)
        require_labels(asked, len(images), classes=votes.cast.shape[1])
        found, cast = self.prove(votes, asked), votes.cast.sum(dim=2)
        ours = cast.gather(1, asked[:, None])[:, 0]
        most = cast.scatter(1, asked[:, None], -1).amax(dim=1)
        counted = {"votes.label": ours.long(), "votes.runner_up": most.long(), **found.evidence}
        return Assessment(predictions, replace(found, evidence=counted))

    def copies(self, images: Float[Tensor, "b c h w"]) -> Copies:
        """Every view of every image."""
        image, view = torch.cartesian_prod(torch.arange(len(images)), torch.arange(len(self.views))).unbind(dim=1)
        return Copies(image, view, view)

    def objectives(self) -> Sequence[Objective]:
        return (StolenVotes(self.views, getattr(self, "threshold", None)),)


@dataclass(frozen=True)
class ThresholdVotes(Smoothing):
    """A view votes for every class whose probability is at least `threshold`: for several, or none."""

    threshold: float = field(default=0.3, kw_only=True)

    def __post_init__(self) -> None:
        if self.engine.precision not in ("fp32", "auto"):
            raise InputError(f"{self.name} votes in float32; leave precision at fp32, not {self.engine.precision}")
        if not isinstance(self.engine, Measured):
            object.__setattr__(self, "engine", replace(self.engine, precision="fp32", compile=False))
        super().__post_init__()

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"threshold": self.threshold}

    def votes(self, images: Float[Tensor, "b c h w"]) -> Votes:
        """Probabilities in float32. A vote is open where the log-odds of its class are within τ, and the rounding of a
        softmax, of the threshold's."""
        odds = log(self.threshold / (1 - self.threshold))
        self.evaluator.refresh()
        engine = self.evaluator.engine
        tau = engine.tau_fp32 if isinstance(engine, Measured) else 0.0
        tau += 16 * torch.finfo(torch.float32).eps / (1 - self.threshold)

        def read(logits: Tensor, _rows: Tensor | slice) -> Tensor:
            probability = logits.softmax(dim=1)
            cast = probability >= self.threshold
            lead = logits.log_softmax(dim=1) - torch.log1p(-probability) - odds
            return torch.stack([cast, cast & (lead >= tau), cast | ~(lead <= -tau)], dim=1)

        keep = self.views.keep(images.device)
        found = self.evaluator.evaluate(images, keep, self.copies(images), read, precision="fp32")
        passes = torch.full((len(images),), len(self.views), device=images.device)
        cast, low, high = found.unflatten(0, (len(images), len(self.views))).permute(2, 0, 3, 1).double()
        return Votes(cast, low, high, passes)


@dataclass(frozen=True)
class CountingVotes(Smoothing):
    """Votes are counted: the certificates of Levine & Feizi, and the exact one.

    `count`: n_y ≥ n_c + 2Δ + 1[c < y] for all c. `exact`, for every patch p too: what y has left outside A(p) is at
    least what c has there, + |A(p)| + 1[c < y]. Both verdicts are in the evidence; `certificate` says which one counts.
    """

    certificate: Certificate = field(default="count", kw_only=True)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"certificate": self.certificate}

    def prove(self, votes: Votes, labels: Int64[Tensor, " b"]) -> Certificates:
        windows = self.windows.to(labels.device)
        later = torch.arange(votes.cast.shape[1], device=labels.device) >= labels[:, None]
        ties = later.double()[:, :, None]  # a tie goes to the smaller label: 1 − 1[c < y] votes are to spare
        count = counted_lead(votes.low, votes.high, labels, windows) + ties
        exact = bounded_lead(votes.low, votes.high, labels, windows, least=0, most=1) + ties
        each = {
            name: certificates(lead, labels, windows, passes=votes.passes, above=0)
            for name, lead in (("count", count), ("exact", exact))
        }
        both = {f"votes.{name}": found.certified for name, found in each.items()}
        return replace(each[self.certificate], evidence={**both, **each["exact"].evidence})


@dataclass(frozen=True)
class DerandomizedSmoothing(CountingVotes, ThresholdVotes):
    """De-randomized smoothing (Levine & Feizi, NeurIPS 2020): a view for every column (row, pixel)."""

    name: ClassVar[str] = "derandomized-smoothing"
    Options: ClassVar[type[Any]] = SmoothingOptions


@dataclass(frozen=True)
class SmoothedViT(CountingVotes):
    """Smoothed ViT (Salman et al., CVPR 2022): a view every `stride` pixels, one vote per view, for its argmax.

    Meant for a ViT that drops the tokens that are wholly hidden (a classifier's own `masked`).
    """

    band: int = field(default=19, kw_only=True)
    stride: int = field(default=10, kw_only=True)

    name: ClassVar[str] = "smoothed-vit"
    Options: ClassVar[type[Any]] = SmoothedViTOptions

    @property
    def step(self) -> int:
        return self.stride

    def votes(self, images: Float[Tensor, "b c h w"]) -> Votes:
        """A label that does not lead by τ in float32 may turn into any other."""
        self.evaluator.refresh()
        found = self.evaluator.answers(images, self.views.keep(images.device), self.copies(images))
        engine = self.evaluator.engine
        tau = engine.tau_fp32 if isinstance(engine, Measured) else 0.0
        shape = (len(images), len(self.views))
        read = found.label, (found.gap >= tau) & found.gap.isfinite(), found.passes
        label, sure, passes = (values.unflatten(0, shape).to(images.device) for values in read)
        classes = self.classes(images)
        votes, sure = torch.nn.functional.one_hot(label, classes).bool(), sure[:, :, None]
        cast, low, high = (v.transpose(1, 2).double() for v in (votes, votes & sure, votes | ~sure))
        return Votes(cast, low, high, passes.sum(dim=1))

    def classes(self, images: Tensor) -> int:
        known = getattr(self.classifier, "num_classes", None)
        if known is None:
            one = Copies.unmasked(1)
            known = self.evaluator.evaluate(images[:1], None, one, lambda logits, _: logits).shape[1]
        return int(known)


@dataclass(frozen=True)
class PatchGuardSmoothing(ThresholdVotes):
    """Robust masking of the votes of de-randomized smoothing (PatchGuard-DS; Xiang et al., USENIX Security 2021)."""

    name: ClassVar[str] = "patchguard-smoothing"
    Options: ClassVar[type[Any]] = PatchGuardSmoothingOptions

    def scores(self, votes: Tensor) -> Tensor:
        return robust_masking(votes, self.windows.to(votes.device))

    def prove(self, votes: Votes, labels: Int64[Tensor, " b"]) -> Certificates:
        windows = self.windows.to(labels.device)
        lead = robust_masking_lead(votes.low, votes.high, labels, windows)
        return certificates(lead, labels, windows, passes=votes.passes, above=0)
