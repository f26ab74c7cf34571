"""What can be chosen: plain data with its rules. Nothing heavy is imported: flags are known at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from patchproof.types import InputError, Precision, PrecisionChoice, require_kinds

PlaceSearch = Literal["gradient", "grid", "exhaustive"]
AttackTarget = Literal["undefended", "defended", "both"]
LossName = Literal["cross-entropy", "bagcert", "ibp"]
Schedule = Literal["step", "cosine", "constant"]
Optimizer = Literal["sgd", "adamw"]
Augmentation = Literal["none", "light", "shift"]
Ablation = Literal["column", "row", "block"]
Certificate = Literal["count", "exact"]
GutoutTarget = Literal["predicted", "label"]
Upsampling = Literal["bilinear", "bicubic", "nearest"]


class Checked:
    """Refuses, field by field, what the annotation rules out."""

    def __post_init__(self) -> None:
        require_kinds(type(self), vars(self))


@dataclass(frozen=True, kw_only=True)
class Engine(Checked):
    """Arithmetic of the passes over masked copies."""

    precision: PrecisionChoice = "fp32"
    """Arithmetic of the fast passes; labels too close to call are decided again, at last in float32. `auto` takes the
    one that is fastest on this network and these images, on a CPU fp32."""
    batch_size: int | Literal["auto"] = "auto"
    """Masked copies in one forward pass, or `auto`."""
    compile: bool | Literal["auto"] = False
    """Compile the network for the fast passes: some seconds at the start, faster passes after. `auto` does so when much
    work lies ahead of a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size != "auto" and self.batch_size < 1:
            raise InputError(f"batch_size must be a positive number or `auto`, not {self.batch_size}")

    @property
    def fast(self) -> Precision:
        """The arithmetic of the fast passes; as long as none has been chosen, float32."""
        return "fp32" if self.precision == "auto" else self.precision


@dataclass(frozen=True, kw_only=True)
class PatchCleanserOptions:
    """Options of `patchcleanser`."""

    per_axis: int = 3
    """Masks per axis, at most: 3 is quick, 6 certifies more images at some 15 times the cost."""
    exhaustive: bool = False
    """Evaluate every pair of masks, also of images already known to fail: the reference to compare with."""


@dataclass(frozen=True, kw_only=True)
class AlarmOptions:
    """Options of `alarm`."""

    per_axis: int = 3
    """Masks per axis, at most: more of them are smaller, and take more passes."""


@dataclass(frozen=True, kw_only=True)
class PatchGuardSmoothingOptions(Checked):
    """Options of `patchguard-smoothing`."""

    ablation: Ablation = "column"
    """What a view shows: a band of columns, of rows, or a block."""
    band: int = 4
    """Width of the band (side of the block) in pixels."""
    threshold: float = 0.3
    """A view votes for every class whose probability is at least this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold < 1:
            raise InputError(f"threshold must be in (0, 1), not {self.threshold}")


@dataclass(frozen=True, kw_only=True)
class SmoothingOptions(PatchGuardSmoothingOptions):
    """Options of `derandomized-smoothing`."""

    certificate: Certificate = "count"
    """`count` is the paper's: votes lead by more than twice what a patch can touch. `exact` looks at each place of the
    patch, and never certifies less."""


@dataclass(frozen=True, kw_only=True)
class SmoothedViTOptions(Checked):
    """Options of `smoothed-vit`."""

    ablation: Ablation = "column"
    """What a view shows: a band of columns, of rows, or a block."""
    band: int = 19
    """Width of the band (side of the block) in pixels."""
    stride: int = 10
    """Pixels from one view to the next."""
    certificate: Certificate = "count"
    """`count` is the paper's, with Δ counted; `exact` looks at each place of the patch, and never certifies less."""


@dataclass(frozen=True, kw_only=True)
class BagCertOptions(Checked):
    """Options of `bagcert`."""

    score: Literal["step", "sigmoid"] = "step"
    """Local scores: 0 or 1 by the sign of the local logit, or its sigmoid."""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """Of a defence that has none."""


DEFENSE_OPTIONS: Mapping[str, type[Any]] = {
    "patchcleanser": PatchCleanserOptions,
    "alarm": AlarmOptions,
    "derandomized-smoothing": SmoothingOptions,
    "smoothed-vit": SmoothedViTOptions,
    "clipped-bagnet": NoOptions,
    "patchguard-bagnet": NoOptions,
    "patchguard-smoothing": PatchGuardSmoothingOptions,
    "bagcert": BagCertOptions,
    "ibp": NoOptions,
}
"""Of the defences that are part of the package."""


@dataclass(frozen=True)
class AttackPlan(Checked):
    """What to attack and how hard: `steps` of at most `step_size` for each of `restarts` starts at each of `places`.

    The first start is the image itself, the others are noise.
    """

    target: AttackTarget = "both"
    """What to attack: the classifier alone, the defence, or both."""
    steps: int = 40
    """Gradient steps for each start at each place."""
    restarts: int = 2
    """Starts at each place: the image's own pixels, then noise."""
    places: int = 4
    """Places of the patch that are tried on each image."""
    place_search: PlaceSearch = "gradient"
    """Where to put it: where the input gradient is largest, evenly, or everywhere (then `places` does not matter)."""
    step_size: float = 0.1
    """Largest change of a pixel in one step; falls linearly to zero over the steps."""
    only_certified: bool = False
    """Attack the defence on certified images alone: all effort goes to disproving the certificate."""
    seed: int = 0
    """For the noise that patches start from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", "restarts", "places"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.step_size <= 1:
            raise InputError(f"step_size must be in (0, 1], as pixels are in [0, 1], not {self.step_size}")
        if self.only_certified and self.target == "undefended":
            raise InputError("only_certified is about the defence, and target `undefended` leaves it alone; drop one")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Checked):
    """The fields of `Plan`, and what they may be."""

    strategy: Any = "greedy"
    """Which masked copies to learn from (`patchproof ls strategies`)."""
    loss: Any = "cross-entropy"
    """What to minimise: `cross-entropy` of the masked copies; or on whole images (strategy `none`) `bagcert`, a hinge
    on the margin of that certificate, or `ibp`, the cross-entropy of interval bounds with warm-up."""
    memory_tries: str | int | tuple[int, int, int, int] = "2"
    """Of `memory`: how many masks are tried again in each of the four rounds; `2,2,2,1` gives each its own number, and
    a last one of 1 takes no pass."""
    memory_refresh: int = 0
    """Of `memory`: look at all masks again every so many epochs; 0: in the first alone."""
    views: int = 1
    """Of `column4` and its like: random views of each image to learn from in a step."""
    gutout_target: GutoutTarget = "predicted"
    """Of `gutout`: the class whose evidence is hidden. Aimed at the label, the hole tells the network the label."""
    gutout_layer: str | None = None
    """Of `gutout`: name of the layer that Grad-CAM looks at; default: the last feature map, of a ViT the tokens that
    enter the last block."""
    gutout_upsampling: Upsampling = "bilinear"
    """Of `gutout`: how the map is enlarged to the image."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 64
    """Images of one optimiser step, over all processes."""
    learning_rate: float | None = None
    """Default, as in the paper: 0.001 for transformers and ConvNeXt, 0.01 for the rest."""
    schedule: Schedule = "step"
    """`step` divides the learning rate by 10 after half of the epochs."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate rises from zero."""
    optimizer: Optimizer = "sgd"
    """SGD is the paper's."""
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 0.0
    """L2 penalty (sgd) or decoupled decay (adamw)."""
    teacher: Any = None
    """A classifier whose answers for the masked copies are learned too."""
    teacher_weight: float = 0.5
    """Share of the teacher's answers in the loss (KL divergence); the rest is that of the labels."""
    label_smoothing: float = 0.0
    """Share of the target spread over all classes."""
    ema: float = 0.0
    """Decay of a running average of the weights, e.g. 0.999, which is then validated and kept; 0 for none."""
    start_share: float = 0.0
    """Share of the weights that training begins with in those that are validated and kept (WiSE-FT), e.g. 0.2 for a
    network that knows the classes already; 0 for none."""
    augment: Augmentation = "none"
    """`light`: mirror, and crop to 50-100% of the area; `shift`: mirror, and shift by up to an eighth of the side."""
    clean_copies: bool = False
    """Learn from the unmasked images too."""
    head_only: bool = False
    """Freeze all layers but the last."""
    accumulate: int = 1
    """Parts that each batch is cut into, to save memory; BatchNorm normalises each part by itself."""
    mask_patch: str = "3%"
    """The training masks are the 3x3 and 6x6 sets of this patch; it is also that of the losses `bagcert` and `ibp`, and
    of validation."""
    validate_with: str = "patchcleanser"
    """The defence, with its default options, that validation images are certified with."""
    validation_images: int = 500
    """How many images, always the same ones, are validated after each epoch."""
    seed: int = 0
    """Everything random follows from it."""
    precision: Precision = "fp32"
    """Mixed precision of training and search."""
    compile: bool = False
    """Compile the network for the search, the loss `bagcert`, and on a GPU the step, whose kernels are recorded and
    replayed: a minute at the start, faster steps after. What the network's forward pass does in Python happens once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.memory_tries, str):  # numbers become the text that a manifest has
            numbers = self.memory_tries if isinstance(self.memory_tries, Iterable) else (self.memory_tries,)
            object.__setattr__(self, "memory_tries", ",".join(map(str, numbers)))
        names, counts = get_args(LossName), ("epochs", "batch_size", "validation_images", "views")
        rate = 1 if self.learning_rate is None else self.learning_rate
        rules = (
            ("strategy", isinstance(self.strategy, str) or callable(self.strategy), "must be a name or a callable"),
            ("loss", self.loss in names or callable(self.loss), f"must be one of {', '.join(names)}, or a callable"),
            (
                "strategy",
                self.loss == "cross-entropy" or self.strategy == "none",
                f"must be `none` with the loss {self.loss!r}, which sees whole images",
            ),
            ("loss", self.loss == "cross-entropy" or self.teacher is None, "must be cross-entropy with a teacher"),
            *((name, getattr(self, name) >= 1, "must be at least 1") for name in counts),
            ("seed", 0 <= self.seed < 2**63, "must be in [0, 2^63)"),
            ("learning_rate", 0 < rate < math.inf, "must be positive and finite"),
            ("warmup_epochs", 0 <= self.warmup_epochs <= self.epochs, "must be in [0, epochs]"),
            ("momentum", 0 <= self.momentum < 1, "must be in [0, 1)"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "must be finite and at least 0"),
            ("teacher_weight", 0 <= self.teacher_weight <= 1, "must be in [0, 1]"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "must be in [0, 1)"),
            ("ema", 0 <= self.ema < 1, "must be in [0, 1), e.g. 0.999"),
            ("start_share", 0 <= self.start_share < 1, "must be in [0, 1), e.g. 0.2"),
            ("memory_refresh", self.memory_refresh >= 0, "cannot be negative"),
            ("accumulate", 1 <= self.accumulate <= self.batch_size, "must be in [1, batch_size]"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise InputError(f"{name} {rule}, not {getattr(self, name)}")
        self.tries()

    def tries(self) -> tuple[int, int, int, int]:
        """`memory_tries` for each of the four rounds."""
        numbers = [int(part) if part.strip().isdecimal() else 0 for part in str(self.memory_tries).split(",")]
        if len(numbers) not in (1, 4) or min(numbers) < 1:
            raise InputError(f"memory_tries must be one positive number or four, e.g. 2,2,2,1, not {self.memory_tries}")
        first, second, third, fourth = numbers * (4 // len(numbers))
        return first, second, third, fourth
