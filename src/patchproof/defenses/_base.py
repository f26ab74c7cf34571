"""What a certified defence is: an answer, and a proof about that answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from patchproof.defenses._table import BLOCK, MaskTable
from patchproof.geometry import Fields, MaskSet, PatchThreat
from patchproof.masking import (
    Engine,
    Evaluator,
    Measured,
    check_classifier,
    default_batch,
    masks_for,
    require_images,
)
from patchproof.models import fingerprint, mask_colour
from patchproof.types import CheckError, Classifier, InputError, kind_of

Guarantee = Literal["recovery", "detection"]

TABLE_CELLS = 1 << 22
"""Masked copies of all images of a batch that a table has room for: some 200 MB, whatever the number of masks."""


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
    an image takes at most; `evidence`, the names that records of images that could not be read leave empty.
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
    """Answers, and certificates about `labels` or else about the answers themselves; an alarm is never certified."""
    own = getattr(defense, "assess", None)
    if own is not None:
        return _checked(own(images, labels), defense, labels, len(images))
    predictions = defense.predict(images)
    about = predictions.clamp(min=0) if labels is None else labels
    found = _checked(Assessment(predictions, defense.certify(images, about)), defense, labels, len(images))
    if labels is None:
        certified = found.certificates.certified & (predictions >= 0)
        found = replace(found, certificates=replace(found.certificates, certified=certified))
    return found


def _checked(found: Assessment, defense: Defense, labels: Tensor | None, count: int) -> Assessment:
    """What a defence answered, of the types and shapes it must have, and not against its own guarantee."""
    proof, name = found.certificates, type(defense).__name__
    if not isinstance(proof, Certificates):
        raise CheckError(f"{name}.certify must return Certificates, not {type(proof).__name__}")
    kinds = {"predictions": "int64", "certified": "bool", "margin": "float32", "forwards": "int64"}
    for part in kinds:
        values: Any = found.predictions if part == "predictions" else getattr(proof, part)
        if not isinstance(values, Tensor) or values.shape != (count,) or str(values.dtype) != f"torch.{kinds[part]}":
            raise CheckError(f"{name}: {part} must be {kinds[part]} of shape ({count},), not {kind_of(values)}")
    for key, values in proof.evidence.items():
        if not isinstance(values, Tensor) or len(values) != count or not bool(values.isfinite().all()):
            raise CheckError(f"{name}: the evidence {key!r} must be a tensor of finite numbers with {count} rows")
    if defense.guarantee == "recovery":
        if bool((found.predictions < 0).any()):
            raise CheckError(f"{name} answers −1: an alarm is for defences whose guarantee is detection")
        if labels is not None and bool((proof.certified & (found.predictions != labels)).any()):
            raise CheckError(f"{name} certifies a label that it does not itself answer")
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


def require_one_patch(name: str, threat: PatchThreat) -> None:
    if threat.patches != 1:
        raise InputError(f"{name} certifies against one patch, not {threat.patches}; patchcleanser and alarm know two")


class EvaluatedDefense:
    """What defences share that ask one `evaluator` about copies of an image under their `occlusions`.

    Without a measured engine, τ is measured on the images of the first `certify`, before anything is certified.
    """

    classifier: Classifier
    threat: PatchThreat
    engine: Engine
    evaluator: Evaluator

    @property
    def occlusions(self) -> MaskSet | Fields:
        raise NotImplementedError

    @property
    def chunk(self) -> int:
        """Masked copies in one pass."""
        size = self.engine.batch_size
        return default_batch(self.threat.image_size, device_of(self)) if size == "auto" else size

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


@dataclass(frozen=True)
class MaskedDefense(EvaluatedDefense):
    """Common ground of the defences that look at an image through an 𝓡-covering mask set 𝓜."""

    classifier: Classifier
    masks: MaskSet
    threat: PatchThreat
    engine: Engine = field(default_factory=Engine, kw_only=True)
    evaluator: Evaluator = field(init=False, repr=False, compare=False)

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee]
    evidence: ClassVar[Sequence[str]] = ("witness",)
    most_patches: ClassVar[int] = 2
    """On an image at once; a defence that does not say is for one."""

    def __post_init__(self) -> None:
        kinds = {"masks": MaskSet, "threat": PatchThreat, "engine": Engine}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"{name} must be a pp.{kind.__name__}, not {kind_of(getattr(self, name))}")
        if not callable(self.classifier):
            raise InputError(
                f"classifier must be a callable from images to logits, not {kind_of(self.classifier)}; "
                "pp.load_classifier makes one from a name"
            )
        mask_colour(self.classifier)
        missed = self.masks.uncovered(self.threat)
        if missed:
            what = "patch positions" if self.threat.patches == 1 else "pairs of patch positions"
            raise InputError(
                f"masks do not cover the threat: {len(missed)} {what} are hidden by no mask, "
                f"e.g. {next(iter(missed))}; build them with covering_masks(threat, per_axis=…)"
            )
        object.__setattr__(self, "evaluator", Evaluator(self.classifier, self.engine))

    @property
    def occlusions(self) -> MaskSet:
        return self.masks

    @classmethod
    def of(cls, classifier: Classifier, threat: PatchThreat, *, engine: Engine, per_axis: int, **options: Any) -> Any:
        """With the covering masks of the threat, `per_axis` of them on each axis."""
        return cls(classifier, masks_for(classifier, threat, per_axis=per_axis), threat, engine=engine, **options)

    @property
    def images_at_once(self) -> int:
        """Images whose copies share chunks: enough to fill them while some images drop out, and on a slow CPU few
        enough that records come often."""
        pairs = len(self.masks) * (len(self.masks) + 1) // 2  # the more masks, the fewer images
        most = max(1, TABLE_CELLS // pairs)
        return max(1, min(most, self.chunk // (1 if device_of(self).type == "cuda" else BLOCK)))

    @property
    def most_passes(self) -> int:
        """Masked copies of an image."""
        return len(self.masks)

    def describe(self) -> dict[str, Any]:
        masks: Any
        try:
            rows, columns = (" ".join(f"{start}-{stop}" for start, stop in axis) for axis in self.masks.axes)
            masks = f"{len(self.masks.axes[0])}x{len(self.masks.axes[1])} masks, rows {rows}, columns {columns}"
        except InputError:  # masks of one's own need not form a grid
            masks = self.masks.rects
        return {
            "name": self.name,
            "guarantee": self.guarantee,
            "image_size": list(self.threat.image_size),
            "patch_sizes": [list(size) for size in self.threat.patch_sizes],
            **({} if self.threat.patches == 1 else {"patches": self.threat.patches}),
            "masks": masks,
            **self.arithmetic(),
        }

    def table(
        self,
        images: Float[Tensor, "b c h w"],
        labels: Int64[Tensor, " b"] | None,
        cells: tuple[Int64[Tensor, " u"], Int64[Tensor, " u"]],
    ) -> MaskTable:
        """A table of the copies x ⊙ m_first ⊙ m_second, filled as it is asked."""
        require_images(images, self.masks.image_size)
        return MaskTable(self.evaluator, images, self.masks.keep(images.device), *cells, labels)

    def central_first(self) -> Int64[Tensor, " n"]:
        """The masks in the order in which they are likely to fail: those of two rectangles hide more, and central ones
        hide the object more often."""
        (height, width), parts = self.masks.image_size, self.masks.parts
        offset = torch.tensor([
            sum(abs(r.top + r.bottom - height) / height + abs(r.left + r.right - width) / width for r in part)
            for part in parts
        ]).tolist()  # fmt: skip
        return torch.tensor(sorted(range(len(parts)), key=lambda mask: (-len(parts[mask]), offset[mask])))
