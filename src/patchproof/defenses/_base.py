"""What a certified defence is: an answer, and a proof about that answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from patchproof.geometry import Fields, MaskSet, PatchThreat
from patchproof.masking import (
    Engine,
    Evaluator,
    Measured,
    check_classifier,
    default_batch,
    label_range,
    require_classes,
)
from patchproof.models import fingerprint
from patchproof.settings import NoOptions
from patchproof.types import CheckError, InputError, kind_of

Guarantee = Literal["recovery", "detection"]


@dataclass(frozen=True)
class Certificates:
    """What was proved of each image, and at what cost.

    `margin` is how far the certificate is from failing, negative when it failed; for an image given up early it bounds
    the true value from above. `forwards` counts the passes per image. `evidence` is what the defence has to show for
    it: name -> tensor whose first axis is b; in a record, `witness.label` becomes `label` inside `witness`.
    """

    certified: Bool[Tensor, " b"]
    margin: Float[Tensor, " b"]
    forwards: Int64[Tensor, " b"]
    evidence: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Certificates:
        moved = {name: values.to(device) for name, values in self.evidence.items()}
        return Certificates(self.certified.to(device), self.margin.to(device), self.forwards.to(device), moved)


@dataclass(frozen=True)
class Assessment:
    """A defence's answers together with certificates; `remarks` are further facts about each answer."""

    predictions: Int64[Tensor, " b"]
    certificates: Certificates
    remarks: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Assessment:
        remarks = {name: values.to(device) for name, values in self.remarks.items()}
        return Assessment(self.predictions.to(device), self.certificates.to(device), remarks)


@runtime_checkable
class Defense(Protocol):
    """A certified image keeps its label under every patch of the threat (recovery: predict(x′) = y for all x′ ∈ 𝓐_𝓡(x))
    or raises an alarm (detection: predict(x′) ∈ {y, −1}).

    Optional: `classifier`, whose answers are the undefended ones and on which τ is measured; `assess(images, labels)`,
    to answer and certify together; `occlusions` (or `masks`), under which τ is measured; `engine` and
    `with_engine(measured)`, to be given the τ; `objectives()`, ways to fail for attacks to climb; `surrogate(images)`,
    differentiable scores for them to climb instead of F; `explain(image)`, all that the answer follows from, as JSON,
    to keep with a certificate that fell; `images_at_once`, a good number of images per call; `most_passes`, those that
    an image takes at most; `evidence`, the names that records of images that could not be read leave empty; `device`,
    where images are to be, if not where the classifier is.
    """

    @property
    def name(self) -> str: ...
    @property
    def guarantee(self) -> Guarantee: ...
    @property
    def threat(self) -> PatchThreat: ...

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """Labels; −1 is an alarm (detection only)."""

    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates: ...

    def describe(self) -> dict[str, Any]:
        """What must be equal for a run to go on, as JSON."""


def assess(defense: Defense, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> Assessment:
    """Answers, and certificates about `labels` or else about the answers themselves; an alarm is never certified.

    What the defence returned is of the types and shapes it must have, and not against its own guarantee.
    """
    own, name, count = getattr(defense, "assess", None), type(defense).__name__, len(images)
    if own is not None:
        found = own(images, labels)
    else:
        predictions = defense.predict(images)
        found = Assessment(predictions, defense.certify(images, predictions.clamp(min=0) if labels is None else labels))
    proof = found.certificates
    if not isinstance(proof, Certificates):
        raise CheckError(f"{name}.certify must return Certificates, not {type(proof).__name__}")
    kinds = {"predictions": "int64", "certified": "bool", "margin": "float32", "forwards": "int64"}
    for part, kind in kinds.items():
        values: Any = found.predictions if part == "predictions" else getattr(proof, part)
        if not isinstance(values, Tensor) or values.shape != (count,) or str(values.dtype) != f"torch.{kind}":
            raise CheckError(f"{name}: {part} must be {kind} of shape ({count},), not {kind_of(values)}")
    for key, values in proof.evidence.items():
        if not isinstance(values, Tensor) or len(values) != count or not bool(values.isfinite().all()):
            raise CheckError(f"{name}: the evidence {key!r} must be a tensor of finite numbers with {count} rows")
    if defense.guarantee == "recovery":
        if bool((found.predictions < 0).any()):
            raise CheckError(f"{name} answers −1: an alarm is for defences whose guarantee is detection")
        if labels is not None and bool((proof.certified & (found.predictions != labels)).any()):
            raise CheckError(f"{name} certifies a label that it does not itself answer")
    if own is None and labels is None:
        return replace(found, certificates=replace(proof, certified=proof.certified & (found.predictions >= 0)))
    return found


def require_defense(value: Any) -> None:
    """Refuse what is no defence, naming what it lacks."""
    if not isinstance(value, Defense):
        needed = ("name", "guarantee", "threat", "predict", "certify", "describe")
        raise InputError(
            f"{type(value).__name__} is no defence: it lacks "
            f"{', '.join(name for name in needed if not hasattr(value, name))}; e.g. "
            'pp.defense("patchcleanser", classifier, threat)'
        )


def device_of(defense: Any) -> torch.device:
    """Where the defence computes: its own `device`, or that of its classifier's weights."""
    own = getattr(defense, "device", None)
    if own is not None:
        return torch.device(own)
    classifier = getattr(defense, "classifier", None)
    first = next(classifier.parameters(), None) if isinstance(classifier, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


def require_labels(labels: Tensor, count: int, *, classes: int | None = None) -> None:
    """Refuse what is no label for each of `count` images, or where `classes` is known no output of the classifier."""
    if not (isinstance(labels, Tensor) and labels.shape == (count,) and labels.dtype == torch.int64):
        given = f"{labels.dtype} of {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"labels must be a tensor of one int64 number for each of the {count} images, not {given}")
    if classes is not None:
        require_classes(label_range(labels), classes)


class OwnDefense:
    """What the defences of the package share. They compute in float64 and are for one patch unless they say otherwise.

    A subclass is a frozen dataclass with these fields; `Options` has its own options, and `of` builds it from them.
    """

    classifier: Any
    threat: PatchThreat
    engine: Engine

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee] = "recovery"
    most_patches: ClassVar[int] = 1
    """On an image at once."""
    Options: ClassVar[type[Any]] = NoOptions

    def __post_init__(self) -> None:
        for name, kind in {"threat": PatchThreat, "engine": Engine}.items():
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"{name} must be a pp.{kind.__name__}, not {kind_of(getattr(self, name))}")
        if isinstance(self.classifier, type):
            name = self.classifier.__name__
            raise InputError(f"classifier must be an instance: {name} is a class; give {name}()")
        if not callable(self.classifier):
            raise InputError(
                f"classifier must be a callable from images to logits, not {kind_of(self.classifier)}; "
                "pp.load_classifier makes one from a name"
            )
        if self.threat.patches > self.most_patches:
            raise InputError(
                f"{self.name} certifies against one patch, not {self.threat.patches}; patchcleanser and alarm know two"
            )

    @classmethod
    def of(cls, classifier: Any, threat: PatchThreat, *, engine: Engine, **options: Any) -> Any:
        return cls(classifier, threat, engine=engine, **options)  # type: ignore[call-arg]

    @property
    def chunk(self) -> int:
        """Copies of an image in one pass."""
        size = self.engine.batch_size
        return default_batch(self.threat.image_size, device_of(self)) if size == "auto" else size

    @property
    def images_at_once(self) -> int:
        """In float64, which takes twice the memory; passes are cheap beside it."""
        return self.chunk if self.engine.batch_size != "auto" else max(1, self.chunk // 4)

    def measure(self, images: Float[Tensor, "b c h w"]) -> None:
        """Earn τ on these images, before anything is certified; what is computed in float64 needs none."""

    def require_precision(self, words: str) -> None:
        """Refuse a precision that would change nothing."""
        if self.engine.precision not in ("fp32", "auto"):
            raise InputError(f"{self.name} {words}; leave precision at fp32, not {self.engine.precision}")

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "image_size": list(self.threat.image_size),
            "patch_sizes": [list(size) for size in self.threat.patch_sizes],
        }


class EvaluatedDefense(OwnDefense):
    """What defences share that ask one `evaluator` about copies of an image under their `occlusions`.

    Without a measured engine, τ is measured on the images of the first `certify`, before anything is certified.
    """

    evaluator: Evaluator

    @property
    def occlusions(self) -> MaskSet | Fields:
        raise NotImplementedError

    def with_engine(self, engine: Measured) -> Any:
        return replace(self, engine=engine)  # type: ignore[type-var]

    def arithmetic(self) -> dict[str, Any]:
        """What `describe` says of the engine; on a CPU `auto` stands for something known."""
        cuda, engine = device_of(self).type == "cuda", self.engine
        return {
            "precision": engine.precision if cuda else engine.fast,
            "compile": engine.compile if cuda else engine.compile is True,
        }

    def measure(self, images: Float[Tensor, "b c h w"]) -> None:
        """Earn τ on these images, unless the engine has it already; again when the weights have changed since."""
        if isinstance(self.engine, Measured) or not len(images):
            return
        now = fingerprint(self.classifier) if isinstance(self.classifier, nn.Module) else ()
        if not isinstance(self.evaluator.engine, Measured) or self.evaluator.measured_on != now:
            measured, _ = check_classifier(self.classifier, images, self.occlusions, engine=self.engine)
            self.evaluator.engine, self.evaluator.measured_on = measured, now
