"""Settings as plain data with their rules. Nothing heavy is imported, so the command line knows its flags at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from patchproof.types import InputError, Precision, PrecisionChoice, require_kinds, require_seed

LossName = Literal["cross-entropy", "bagcert", "ibp"]
Optimizer = Literal["sgd", "adamw"]
Ablation = Literal["column", "row", "block"]
Certificate = Literal["count", "exact"]
GutoutTarget = Literal["predicted", "label"]
Upsampling = Literal["bilinear", "bicubic", "nearest"]


class Checked:
    """A dataclass that refuses values of other types than its fields have."""

    def __post_init__(self) -> None:
        require_kinds(type(self), vars(self))


@dataclass(frozen=True, kw_only=True)
class Engine(Checked):
    """Arithmetic of the passes over masked copies."""

    precision: PrecisionChoice = "fp32"
    """Arithmetic of the fast passes; labels too close to call are decided again in more precise arithmetic, at last in
    float32. `auto` measures which precision is fastest on this network and these images; on a CPU it is fp32."""
    batch_size: int | Literal["auto"] = "auto"
    """Masked copies in one forward pass, or `auto`."""
    compile: bool | Literal["auto"] = False
    """Compile the network for the fast passes: some seconds at the start, then faster passes. `auto` compiles if there
    is much work for a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size != "auto" and self.batch_size < 1:
            raise InputError(f"batch_size must be a positive number or `auto`, not {self.batch_size}")

    @property
    def fast(self) -> Precision:
        """The arithmetic of the fast passes; float32 as long as `auto` has not been measured."""
        return "fp32" if self.precision == "auto" else self.precision


@dataclass(frozen=True, kw_only=True)
class PatchCleanserOptions(Checked):
    """Options of `patchcleanser`."""

    per_axis: int = 3
    """Masks per axis, at most: 3 is quick, 6 certifies more images at about 15 times the cost."""
    exhaustive: bool = False
    """Evaluate every pair of masks, even for images already known to fail: a reference to compare with."""


@dataclass(frozen=True, kw_only=True)
class AlarmOptions(Checked):
    """Options of `alarm`."""

    per_axis: int = 3
    """Masks per axis, at most: with more masks each one is smaller, and there are more passes."""


@dataclass(frozen=True, kw_only=True)
class PatchGuardSmoothingOptions(Checked):
    """Options of `patchguard-smoothing`."""

    ablation: Ablation = "column"
    """What a view shows: a band of columns, a band of rows, or a block."""
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
    """`count` is the paper's certificate; `exact` checks each location of the patch, and never certifies less."""


@dataclass(frozen=True, kw_only=True)
class SmoothedViTOptions(Checked):
    """Options of `smoothed-vit`."""

    ablation: Ablation = "column"
    """What a view shows: a band of columns, a band of rows, or a block."""
    band: int = 19
    """Width of the band (side of the block) in pixels."""
    stride: int = 10
    """Pixels from one view to the next."""
    certificate: Certificate = "count"
    """`count` is the paper's certificate, with Δ counted, since the paper's formula for Δ can be too small; `exact`
    checks each location of the patch, and never certifies less."""


@dataclass(frozen=True, kw_only=True)
class BagCertOptions(Checked):
    """Options of `bagcert`."""

    score: Literal["step", "sigmoid"] = "step"
    """Local scores: 0 or 1 by the sign of the local logit, or its sigmoid."""


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a defence that has none."""


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
"""The options of the defences that come with the package."""


@dataclass(frozen=True)
class AttackPlan(Checked):
    """What to attack and how hard: `steps` of at most `step_size` for each of `restarts` starts at each of `places`."""

    target: Literal["undefended", "defended", "both"] = "both"
    """What to attack: the classifier alone, the defence, or both."""
    steps: int = 40
    """Gradient steps for each start at each location."""
    restarts: int = 2
    """Starts at each location: first the image's own pixels, then noise."""
    places: int = 4
    """Locations of the patch to try on each image."""
    place_search: Literal["gradient", "grid", "exhaustive"] = "gradient"
    """Where to put the patch: where the input gradient is largest, on an even grid, or (`exhaustive`) everywhere."""
    step_size: float = 0.1
    """Largest change of a pixel in one step; it falls linearly to zero over the steps."""
    only_certified: bool = False
    """Attack the defence on certified images only, to put all effort into disproving certificates."""
    seed: int = 0
    """Seed of the noise that patches start from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seed(self.seed)
        for name in ("steps", "restarts", "places"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.step_size <= 1:
            raise InputError(f"step_size must be in (0, 1], as pixels are in [0, 1], not {self.step_size}")
        if self.only_certified and self.target == "undefended":
            raise InputError("only_certified is about the defence, and target `undefended` leaves it alone; drop one")


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Checked):
    """The fields of `Plan` and their rules."""

    strategy: Any = "greedy"
    """How to choose the masked copies to learn from (`patchproof ls strategies`)."""
    loss: Any = "cross-entropy"
    """What to minimise: `cross-entropy` of the masked copies; or, on whole images (with strategy `none`), `bagcert`, a
    hinge on the margin of that certificate, or `ibp`, the cross-entropy of interval bounds with warm-up."""
    memory_tries: str | int | tuple[int, int, int, int] = "2"
    """For `memory`: masks to try again in each of the four rounds of a search; `2,2,2,1` sets each round, and a 1 for
    the last round saves its passes."""
    memory_refresh: int = 0
    """For `memory`: number of epochs after which all masks are tried again; 0: only in the first epoch."""
    views: int = 1
    """For `column4`, `row4`, `block12` and the like: random views of each image in one step."""
    gutout_target: GutoutTarget = "predicted"
    """For `gutout`: the class whose evidence is hidden. With `label`, the network can learn to read the label from the
    location of the mask."""
    gutout_layer: str | None = None
    """For `gutout`: name of the layer that Grad-CAM uses; default: the last feature map, or for a ViT the tokens that
    enter the last block."""
    gutout_upsampling: Upsampling = "bilinear"
    """For `gutout`: how the Grad-CAM map is enlarged to the image."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 64
    """Images in one optimiser step, over all processes."""
    learning_rate: float | None = None
    """Learning rate at the start; default, as in the paper: 0.001 for transformers and ConvNeXt, 0.01 for the rest."""
    schedule: Literal["step", "cosine", "constant"] = "step"
    """How the learning rate falls; `step`, the paper's, divides it by 10 after half of the epochs."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises from zero."""
    optimizer: Optimizer = "sgd"
    """Optimiser; the paper uses SGD."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """L2 penalty (sgd) or decoupled weight decay (adamw)."""
    teacher: Any = None
    """A classifier whose answers for the masked copies are learned too."""
    teacher_weight: float = 0.5
    """Weight of the teacher's answers in the loss (KL divergence); the labels have the rest."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    ema: float = 0.0
    """Decay of a running average of the weights, e.g. 0.999, which is then what is validated and saved; 0: none."""
    start_share: float = 0.0
    """Share of the initial weights in the weights that are validated and saved (WiSE-FT), e.g. 0.2 for a network that
    already knows the classes; 0: none."""
    augment: Literal["none", "light", "shift"] = "none"
    """`light`: mirror, and crop to 50-100% of the area; `shift`: mirror, and shift by up to an eighth of the side."""
    clean_copies: bool = False
    """Learn from the unmasked images too."""
    head_only: bool = False
    """Freeze all layers but the last."""
    accumulate: int = 1
    """Parts into which each batch is split to save memory; BatchNorm normalises each part separately."""
    mask_patch: str = "3%"
    """The patch that the 3x3 and 6x6 training masks are built for; also the patch of the losses `bagcert` and `ibp`,
    and of validation."""
    validate_with: str = "patchcleanser"
    """The defence, with its default options, that certifies the validation images."""
    validation_images: int = 500
    """Images to validate after each epoch, always the same ones."""
    seed: int = 0
    """Seed of everything random."""
    precision: Precision = "fp32"
    """Mixed precision of training and search."""
    compile: bool = False
    """Compile the network for the search, the loss `bagcert`, and on a GPU the whole step, which is recorded once and
    replayed: a minute at the start, then faster steps. Python code in the network's forward pass runs only once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.memory_tries, str):  # a manifest holds it as text
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
        require_seed(self.seed)
        self.tries()

    def tries(self) -> tuple[int, int, int, int]:
        """`memory_tries` as a number for each of the four rounds."""
        numbers = [int(part) if part.strip().isdecimal() else 0 for part in str(self.memory_tries).split(",")]
        if len(numbers) not in (1, 4) or min(numbers) < 1:
            raise InputError(f"memory_tries must be one positive number or four, e.g. 2,2,2,1, not {self.memory_tries}")
        first, second, third, fourth = numbers * (4 // len(numbers))
        return first, second, third, fourth
