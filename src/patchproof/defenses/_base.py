"""The protocol of a certified defence, its results, and what the defences of this package share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from patchproof.geometry import Fields, MaskSet, PatchThreat
from patchproof.masking import Engine, Evaluator, Measured, check_classifier, default_batch
from patchproof.masking import require_labels as require_labels
from patchproof.models import fingerprint, require_attributes
from patchproof.settings import NoOptions
from patchproof.types import CheckError, InputError, kind_of, require_kinds, require_one_of

Guarantee = Literal["recovery", "detection"]


@dataclass(frozen=True)
class Certificates:
    """Which images are certified, by what margin, and at what cost.

    `margin` says how far the certificate is from failing and is negative if it failed; for an image given up early it
    is an upper bound. `forwards` counts the passes per image. `evidence` supports the verdict: name -> tensor whose
    first axis is b. In a record, the entry `witness.label` becomes `label` inside `witness`.
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
    """Predictions together with certificates; `remarks` are further facts about each prediction."""

    predictions: Int64[Tensor, " b"]
    certificates: Certificates
    remarks: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Assessment:
        remarks = {name: values.to(device) for name, values in self.remarks.items()}
        return Assessment(self.predictions.to(device), self.certificates.to(device), remarks)


@runtime_checkable
class Defense(Protocol):
    """Predicts labels, and certifies images: a certified image x keeps its label y under every patch of the threat.

    With recovery, predict(x′) = y for all x′ ∈ 𝓐_𝓡(x); with detection, predict(x′) ∈ {y, −1}, where −1 is an alarm.

    Optional members:

    - `classifier`: its predictions are the undefended ones, and τ is measured on it;
    - `assess(images, labels)`: predict and certify together;
    - `occlusions` (or `masks`): the views under which τ is measured;
    - `engine` and `with_engine(measured)`: the arithmetic, and a copy of the defence that has the measured τ;
    - `objectives()`: ways to fail that an attack can climb;
    - `surrogate(images)`: differentiable scores that an attack climbs instead of F;
    - `explain(image)`: all predictions that the answer follows from, as JSON, kept with a certificate that fell;
    - `images_at_once`: a good number of images per call; `most_passes`: the most passes per image;
    - `table_bytes(masks)`: memory for tables about these masks, which a run compares with what is free;
    - `evidence`: the evidence fields that the record of an unreadable image leaves empty;
    - `device`: where images must be, if that is not the classifier's device.
    """

    @property
    def name(self) -> str: ...
    @property
    def guarantee(self) -> Guarantee: ...
    @property
    def threat(self) -> PatchThreat: ...

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        """Return labels; −1 is an alarm (detection only)."""

    def certify(self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]) -> Certificates: ...

    def describe(self) -> dict[str, Any]:
        """Return, as JSON, everything that must be equal for a run to be resumed."""


def assess(defense: Defense, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"] | None = None) -> Assessment:
    """Predict, and certify `labels` or else the predictions themselves; an alarm is never certified.

    Results of the wrong type or shape, or that contradict the defence's guarantee, are refused.
    """
    name, count = type(defense).__name__, len(images)
    if hasattr(defense, "assess"):
        found = defense.assess(images, labels)
    else:
        predictions = defense.predict(images)
        asked = predictions.clamp(min=0) if labels is None and isinstance(predictions, Tensor) else labels
        found = Assessment(predictions, defense.certify(images, asked))
    if not isinstance(found, Assessment):
        raise CheckError(f"{name}.assess must return an Assessment, not {type(found).__name__}")
    predictions, proof = found.predictions, found.certificates
    if not isinstance(proof, Certificates):
        raise CheckError(f"{name}.certify must return Certificates, not {type(proof).__name__}")
    for part, values, kind in (
        ("predictions", predictions, torch.int64),
        ("certified", proof.certified, torch.bool),
        ("margin", proof.margin, None),
        ("forwards", proof.forwards, torch.int64),
    ):
        fits = isinstance(values, Tensor) and values.shape == (count,)
        if not fits or (values.dtype != kind if kind else not values.is_floating_point()):
            expected = str(kind or "a float").removeprefix("torch.")
            raise CheckError(f"{name}: {part} must be {expected} of shape ({count},), not {kind_of(values)}")
    if not isinstance(proof.evidence, Mapping):
        raise CheckError(f"{name}: evidence must map names to tensors, not {kind_of(proof.evidence)}")
    nested = {key.partition(".")[0] for key in proof.evidence if "." in key}
    if nested & proof.evidence.keys():
        raise CheckError(f"{name}: the evidence {min(nested & proof.evidence.keys())!r} is a value and has parts, too")
    for key, values in proof.evidence.items():
        if not isinstance(values, Tensor) or values.shape[:1] != (count,) or not bool(values.isfinite().all()):
            raise CheckError(f"{name}: the evidence {key!r} must be a tensor of finite numbers with {count} rows")
    recovery = defense.guarantee == "recovery"
    if bool((predictions < (0 if recovery else -1)).any()):
        only = (
            "an alarm is for defences whose guarantee is detection" if recovery else "labels are 0 or more, an alarm −1"
        )
        raise CheckError(f"{name} answers {int(predictions.min())}: {only}".replace("answers -", "answers −"))
    if labels is None:
        return replace(found, certificates=replace(proof, certified=proof.certified & (predictions >= 0)))
    certified, asked = (values.to(predictions.device) for values in (proof.certified, labels))
    contradicted = certified & (predictions != asked) & (recovery | (predictions != -1))
    if bool(contradicted.any()):
        raise CheckError(f"{name} certifies a label that it does not itself answer")
    return found


def require_defense(value: Any) -> None:
    """Refuse an object that is no defence, and name the members it lacks."""
    name = type(value).__name__
    if isinstance(value, type):
        raise InputError(f"the defence must be an instance: {value.__name__} is a class; give {value.__name__}(…)")
    needed = ("name", "guarantee", "threat", "predict", "certify", "describe")
    missing = [member for member in needed if not hasattr(value, member)]
    if missing:
        raise InputError(
            f'{name} is no defence: it lacks {", ".join(missing)}; e.g. pp.defense("patchcleanser", classifier, threat)'
        )
    require_one_of("guarantee", value.guarantee, get_args(Guarantee))
    for member, kind, words in (("name", str, "text"), ("threat", PatchThreat, "a pp.PatchThreat")):
        if not isinstance(getattr(value, member), kind):
            raise InputError(f"{name}.{member} must be {words}, not {kind_of(getattr(value, member))}")
    if not isinstance(getattr(value, "engine", None) or Engine(), Engine):
        raise InputError(f"{name}.engine must be a pp.Engine, not {kind_of(value.engine)}")
    at_once = getattr(value, "images_at_once", 1)
    if not isinstance(at_once, Integral) or at_once < 1:
        raise InputError(f"{name}.images_at_once must be a whole number of at least 1, not {at_once!r:.60}")


def require_returned(value: Any, where: str) -> Any:
    """Return what the user's function `where` has returned; refuse what is no defence."""
    try:
        require_defense(value)
    except InputError as error:
        raise CheckError(f"{where} must return a defence: {error}") from error
    return value


def with_engine(defense: Any, engine: Engine) -> Any:
    """The defence with this engine, by its own method, which need not be the package's."""
    return require_returned(defense.with_engine(engine), f"{type(defense).__name__}.with_engine")


def device_of(defense: Any) -> torch.device:
    """Return the defence's own `device`, or that of its classifier's weights."""
    if getattr(defense, "device", None) is not None:
        return torch.device(defense.device)
    classifier = getattr(defense, "classifier", None)
    first = next(classifier.parameters(), None) if isinstance(classifier, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


class OwnDefense:
    """Base class of the package's defences: one patch, computed in float64, unless a subclass says otherwise.

    A subclass is a frozen dataclass with these fields. `Options` are the options a user can give by name, and `of`
    builds the defence from them.
    """

    classifier: Any
    threat: PatchThreat
    engine: Engine

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee] = "recovery"
    most_patches: ClassVar[int] = 1
    """The most patches at once that the defence can certify against."""
    Options: ClassVar[type[Any]] = NoOptions

    def __post_init__(self) -> None:
        if not isinstance(self.threat, PatchThreat):
            raise InputError(f"threat must be a pp.PatchThreat, not {kind_of(self.threat)}")
        if not isinstance(self.engine, Engine):
            raise InputError(f"engine must be a pp.Engine, not {kind_of(self.engine)}")
        if isinstance(self.classifier, type):
            name = self.classifier.__name__
            raise InputError(f"classifier must be an instance: {name} is a class; give {name}()")
        if not callable(self.classifier):
            raise InputError(
                f"classifier must be a callable from images to logits, not {kind_of(self.classifier)}; "
                "pp.load_classifier makes one from a name"
            )
        require_attributes(self.classifier)
        own = {name: getattr(self, name) for name in self.Options.__dataclass_fields__ if hasattr(self, name)}
        require_kinds(self.Options, own)
        if self.threat.patches > self.most_patches:
            raise InputError(
                f"{self.name} certifies against one patch, not {self.threat.patches}; patchcleanser and alarm know two"
            )

    @classmethod
    def of(cls, classifier: Any, threat: PatchThreat, *, engine: Engine, **options: Any) -> Any:
        return cls(classifier, threat, engine=engine, **options)  # type: ignore[call-arg]

    @property
    def chunk(self) -> int:
        """Masked copies in one forward pass."""
        size = self.engine.batch_size
        return default_batch(self.threat.image_size, device_of(self)) if size == "auto" else size

    @property
    def images_at_once(self) -> int:
        """A quarter of a chunk by default: float64 takes twice the memory, and each image only a few passes."""
        return self.chunk if self.engine.batch_size != "auto" else max(1, self.chunk // 4)

    def measure(self, images: Float[Tensor, "b c h w"]) -> None:
        """Measure τ on these images before anything is certified; defences that compute in float64 need none."""

    def require_precision(self, words: str) -> None:
        """Refuse a precision that the defence would not use."""
        if self.engine.precision not in ("fp32", "auto"):
            raise InputError(f"{self.name} {words}; leave precision at fp32, not {self.engine.precision}")

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "image_size": list(self.threat.image_size),
            "patch_sizes": [list(size) for size in self.threat.patch_sizes],
        }


class EvaluatedDefense(OwnDefense):
    """Base class of defences whose `evaluator` classifies copies of an image under their `occlusions`.

    If the engine has no measured τ, it is measured on the images of the first `certify`, before anything is certified.
    """

    @cached_property
    def evaluator(self) -> Evaluator:
        return Evaluator(self.classifier, self.engine)

    @property
    def occlusions(self) -> MaskSet | Fields:
        raise NotImplementedError

    def with_engine(self, engine: Measured) -> Any:
        return replace(self, engine=engine)  # type: ignore[type-var]

    def arithmetic(self) -> dict[str, Any]:
        """The engine as `describe` reports it; on a CPU, where the choice is known, `auto` is resolved."""
        cuda, engine = device_of(self).type == "cuda", self.engine
        return {
            "precision": engine.precision if cuda else engine.fast,
            "compile": engine.compile if cuda else engine.compile is True,
        }

    def measure(self, images: Float[Tensor, "b c h w"]) -> None:
        """Measure τ on these images unless the engine has it already; again if the weights have changed since."""
        if isinstance(self.engine, Measured) or not len(images):
            return
        now = fingerprint(self.classifier) if isinstance(self.classifier, nn.Module) else ()
        if not isinstance(self.evaluator.engine, Measured) or self.evaluator.measured_on != now:
            measured, _ = check_classifier(self.classifier, images, self.occlusions, engine=self.engine)
            self.evaluator.engine, self.evaluator.measured_on = measured, now
