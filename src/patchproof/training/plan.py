"""What a fine-tuning run is told: the paper's schedule unless it is told otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from patchproof.types import InputError, Precision, require_one_of

Schedule = Literal["step", "cosine", "constant"]
Optimizer = Literal["sgd", "adamw"]
Augmentation = Literal["none", "light"]


@dataclass(frozen=True)
class Plan:
    """SGD with momentum 0.9, 10 epochs, learning rate ÷10 after half of them, no augmentation (paper, §4).

    `batch_size` is that of one optimiser step over all processes; `accumulate` cuts it into so many parts, to save
    memory; the step is the same but for BatchNorm, which normalises each part by itself.
    """

    strategy: str = "greedy"
    epochs: int = 10
    batch_size: int = 64
    learning_rate: float = 0.01
    schedule: Schedule = "step"
    warmup_epochs: float = 0.0
    optimizer: Optimizer = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    ema: float = 0.0
    augment: Augmentation = "none"
    clean_copies: bool = False
    head_only: bool = False
    accumulate: int = 1
    seed: int = 0
    precision: Precision = "fp32"
    compile: bool = False

    def __post_init__(self) -> None:
        require_one_of("schedule", self.schedule, get_args(Schedule))
        require_one_of("optimizer", self.optimizer, get_args(Optimizer))
        require_one_of("augment", self.augment, get_args(Augmentation))
        require_one_of("precision", self.precision, get_args(Precision))
        numbers = (
            self.learning_rate,
            self.warmup_epochs,
            self.momentum,
            self.weight_decay,
            self.label_smoothing,
            self.ema,
        )
        _require(all(map(math.isfinite, numbers)), "every number of a plan must be finite", numbers)
        _require(0 <= self.seed < 2**63, "--seed must be in [0, 2^63)", self.seed)
        _require(self.epochs >= 1, "--epochs must be at least 1", self.epochs)
        _require(self.batch_size >= 1, "--batch-size must be at least 1", self.batch_size)
        _require(self.learning_rate > 0, "--learning-rate must be positive", self.learning_rate)
        _require(self.warmup_epochs >= 0, "--warmup-epochs cannot be negative", self.warmup_epochs)
        _require(0 <= self.momentum < 1, "--momentum must be in [0, 1)", self.momentum)
        _require(self.weight_decay >= 0, "--weight-decay cannot be negative", self.weight_decay)
        _require(0 <= self.label_smoothing < 1, "--label-smoothing must be in [0, 1)", self.label_smoothing)
        _require(0 <= self.ema < 1, "--ema must be in [0, 1), e.g. 0.999", self.ema)
        _require(1 <= self.accumulate <= self.batch_size, "--accumulate must be in [1, batch size]", self.accumulate)

    def rate(self, epoch: float) -> float:
        """Learning rate at a (fractional) epoch."""
        warm = min(1.0, epoch / self.warmup_epochs) if self.warmup_epochs else 1.0
        if self.schedule == "step":
            return warm * self.learning_rate * (0.1 if 2 * math.floor(epoch) >= self.epochs > 1 else 1.0)
        if self.schedule == "cosine":
            return warm * self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / self.epochs)))
        return warm * self.learning_rate


def _require(holds: bool, message: str, value: object) -> None:
    if not holds:
        raise InputError(f"{message}, not {value}")


def paper_learning_rate(architecture: str) -> float:
    """0.001 for transformers and ConvNeXt, 0.01 for ResNets and the rest (paper, §4)."""
    small = ("vit", "deit", "beit", "swin", "convnext", "eva", "mixer")
    return 0.001 if any(name in architecture.lower() for name in small) else 0.01
