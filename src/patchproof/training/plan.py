"""What a fine-tuning run is told: the paper's schedule unless it is told otherwise."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from patchproof.training.strategies import MaskingStrategy, require_strategy
from patchproof.types import InputError, Precision, require_one_of

Schedule = Literal["step", "cosine", "constant"]
Optimizer = Literal["sgd", "adamw"]
Augmentation = Literal["none", "light"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """SGD with momentum 0.9, 10 epochs, learning rate ÷10 after half of them, no augmentation (paper, §4)."""

    strategy: str | MaskingStrategy = "greedy"
    """Which masked copies to learn from (`patchproof ls strategies`)."""
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
    label_smoothing: float = 0.0
    """Share of the target spread over all classes."""
    ema: float = 0.0
    """Decay of a running average of the weights, e.g. 0.999, which is then validated and kept; 0 for none."""
    augment: Augmentation = "none"
    """`light`: mirror, and crop to 50-100% of the area."""
    clean_copies: bool = False
    """Learn from the unmasked images too."""
    head_only: bool = False
    """Freeze all layers but the last."""
    accumulate: int = 1
    """Parts that each batch is cut into, to save memory; BatchNorm normalises each part by itself."""
    mask_patch: str = "3%"
    """The training masks are the 3x3 and 6x6 sets of this patch."""
    validation_images: int = 500
    """How many images, always the same ones, are validated after each epoch (3x3 masks)."""
    seed: int = 0
    """Everything random follows from it."""
    precision: Precision = "fp32"
    """Mixed precision of training and search."""
    compile: bool = False
    """Compile the network for the search of `greedy` and `grid`: some seconds at the start, a faster search after."""

    def __post_init__(self) -> None:
        for name, allowed in (("schedule", Schedule), ("optimizer", Optimizer), ("augment", Augmentation)):
            require_one_of(name, getattr(self, name), get_args(allowed))
        require_one_of("precision", self.precision, get_args(Precision))
        if isinstance(self.strategy, str):
            require_strategy(self.strategy)
        floats = ("learning_rate", "warmup_epochs", "momentum", "weight_decay", "label_smoothing", "ema")
        rules = (
            ("strategy", isinstance(self.strategy, str) or callable(self.strategy), "must be a name or a callable"),
            *((name, math.isfinite(getattr(self, name) or 0), "must be finite") for name in floats),
            ("seed", 0 <= self.seed < 2**63, "must be in [0, 2^63)"),
            ("epochs", self.epochs >= 1, "must be at least 1"),
            ("batch_size", self.batch_size >= 1, "must be at least 1"),
            ("validation_images", self.validation_images >= 1, "must be at least 1"),
            ("learning_rate", self.learning_rate is None or self.learning_rate > 0, "must be positive"),
            ("warmup_epochs", self.warmup_epochs >= 0, "cannot be negative"),
            ("momentum", 0 <= self.momentum < 1, "must be in [0, 1)"),
            ("weight_decay", self.weight_decay >= 0, "cannot be negative"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "must be in [0, 1)"),
            ("ema", 0 <= self.ema < 1, "must be in [0, 1), e.g. 0.999"),
            ("accumulate", 1 <= self.accumulate <= self.batch_size, "must be in [1, batch_size]"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise InputError(f"{name} {rule}, not {getattr(self, name)}")

    def describe(self) -> dict[str, Any]:
        """As JSON, a strategy of the user's own by its type and, where it has one, its `describe()`."""
        values = {f.name: getattr(self, f.name) for f in fields(Plan)}
        if not isinstance(self.strategy, str):
            own: Any = self.strategy if hasattr(self.strategy, "__qualname__") else type(self.strategy)
            said = self.strategy.describe() if hasattr(self.strategy, "describe") else {}
            values["strategy"] = str(own.__qualname__) + (f" {json.dumps(said)}" if said else "")
        return values

    def rate(self, epoch: float) -> float:
        """Learning rate at a (fractional) epoch."""
        base = self.learning_rate or 0.0
        warm = min(1.0, epoch / self.warmup_epochs) if self.warmup_epochs else 1.0
        if self.schedule == "step":
            return warm * base * (0.1 if 2 * math.floor(epoch) >= self.epochs > 1 else 1.0)
        if self.schedule == "cosine":
            return warm * base * 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / self.epochs)))
        return warm * base


def paper_learning_rate(architecture: str) -> float:
    """0.001 for transformers and ConvNeXt, 0.01 for ResNets and the rest (paper, §4)."""
    small = ("vit", "deit", "beit", "swin", "convnext", "eva", "mixer")
    return 0.001 if any(name in architecture.lower() for name in small) else 0.01
