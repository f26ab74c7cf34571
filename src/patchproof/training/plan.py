"""The plan of a training run; its defaults are the paper's schedule."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from patchproof.geometry import parse_patches
from patchproof.models import weights_sha256
from patchproof.settings import TrainingSettings
from patchproof.training.losses import Loss
from patchproof.training.strategies import MaskingStrategy, strategy_entry
from patchproof.types import InputError, kind_of

OPTIONS = ("memory_tries", "memory_refresh", "views", "gutout_target", "gutout_layer", "gutout_upsampling")
"""The fields of a plan that are options of some strategies, which call them by the last word."""


@dataclass(frozen=True, kw_only=True)
class Plan(TrainingSettings):
    """SGD with momentum 0.9, 10 epochs, learning rate ÷10 after half of them, no augmentation (paper, §4)."""

    strategy: str | MaskingStrategy = "greedy"
    """The masking strategy, by name (`patchproof ls strategies`) or as an object."""

    loss: str | Loss = "cross-entropy"
    """The loss, by name or as a callable (classifier, images, labels, progress) -> mean over the images, where
    `classifier` is the ImageClassifier around the network that is trained, `classifier.module`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        used = self.strategy_options()  # refuses an unknown name
        if not isinstance(self.strategy, str):
            words = "a pp.MaskingStrategy, called as strategy(classifier, images, labels, indices=…, epoch=…)"
            _require_call(self.strategy, f"strategy must be {words}", None, None, None, indices=None, epoch=0)
        if not isinstance(self.loss, str):
            words = "loss must be a callable, called as loss(classifier, images, labels, progress)"
            _require_call(self.loss, words, None, None, None, 0.0)
        parse_patches(self.mask_patch, (224, 224))  # refused now rather than when training begins
        for option in OPTIONS:
            if option.rpartition("_")[2] not in used and getattr(self, option) != getattr(Plan, option):
                given = self.strategy if isinstance(self.strategy, str) else type(self.strategy).__name__
                raise InputError(
                    f"{option} cannot be set with the strategy {given}, which does not use it; leave it out"
                )
        if not (self.teacher is None or callable(self.teacher)):
            raise InputError(f"teacher must be a classifier, e.g. pp.load_checkpoint(…), not {self.teacher!r}")

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON, which must be equal for a training to be resumed.

        A strategy or loss that is an object is named by its type and, if it has one, its `describe()`; a function by
        its name, and a functools.partial by its function and arguments. A teacher that is a module is named by the
        sha256 of its weights.
        """
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(Plan)}
        values["teacher"] = None if self.teacher is None else weights_sha256(self.teacher) or self.teacher
        for name in ("strategy", "loss", "teacher"):
            given = values[name]
            if given is None or isinstance(given, str):
                continue
            values[name] = _described(given)
        return values

    def strategy_options(self) -> dict[str, Any]:
        """Return the options of a strategy that is given by name."""
        known = strategy_entry(self.strategy).options if isinstance(self.strategy, str) else ()
        values = {name: getattr(self, option) for option in OPTIONS if (name := option.rpartition("_")[2]) in known}
        return values | ({"tries": self.tries()} if "tries" in values else {})

    def rate(self, epoch: float) -> float:
        """Return the learning rate at a (fractional) epoch."""
        warm = min(1.0, epoch / self.warmup_epochs) if self.warmup_epochs else 1.0
        base = warm * (self.learning_rate or 0.0)
        if self.schedule == "step":
            return base * (0.1 if 2 * math.floor(epoch) >= self.epochs > 1 else 1.0)
        if self.schedule == "cosine":
            return base * 0.5 * (1 + math.cos(math.pi * min(1.0, epoch / self.epochs)))
        return base


def _described(given: Any) -> str:
    """A function or object by its name or type, and its settings as JSON."""
    if isinstance(given, partial):
        arguments = {str(place): value for place, value in enumerate(given.args)} | given.keywords
        return f"{_described(given.func)} {json.dumps(arguments, default=_plain, sort_keys=True)}"
    name = str(getattr(given, "__qualname__", type(given).__qualname__))
    details = given.describe() if hasattr(given, "describe") else None
    return f"{name} {json.dumps(details, default=_plain)}" if details else name


def _plain(value: Any) -> Any:
    """What stands in a manifest for a value that is no JSON: numbers for an array, the fields of a dataclass, …"""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, nn.Module):
        return weights_sha256(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if callable(value) or hasattr(value, "describe"):
        return _described(value)
    raise InputError(
        f"a setting of the strategy or loss is of type {kind_of(value)}, which a resumed training cannot compare; give "
        "JSON, an array, a dataclass or an object with describe()"
    )


def _require_call(given: Any, words: str, *values: Any, **named: Any) -> None:
    if isinstance(given, type):
        raise InputError(f"{words}, not the class {given.__name__}; give an instance")
    plain_module = isinstance(given, nn.Module) and type(given).__call__ is nn.Module.__call__
    call = given.forward if plain_module else given  # such a module is called with any arguments
    try:
        inspect.signature(call).bind(*values, **named)
    except ValueError:  # what is not written in Python need not tell its arguments
        return
    except TypeError as error:
        raise InputError(f"{words}: {error}") from error


def paper_learning_rate(architecture: str) -> float:
    """Return 0.001 for transformers and ConvNeXt, 0.01 for ResNets and all others (paper, §4)."""
    small = ("vit", "deit", "beit", "swin", "convnext", "eva", "mixer")
    return 0.001 if any(name in architecture.lower() for name in small) else 0.01
