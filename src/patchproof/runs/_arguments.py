"""What every run can be given besides its defence and its images: refused at the call, not hours into the run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from patchproof.types import InputError, Preprocessing

RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "on_": (callable, "a function"),
    "folder": (lambda given: isinstance(given, str | os.PathLike) and bool(str(given)), "a path"),
    "executor": (lambda given: hasattr(given, "at_work"), "one of patchproof.runs.executors, or like them"),
    "accelerator": (lambda given: hasattr(given, "is_main_process"), "an accelerate.Accelerator"),
    "checkpoint_minutes": (
        lambda given: isinstance(given, Real) and 0 <= float(given) < math.inf,
        "a number of at least 0",
    ),
    "preprocessing": (
        lambda given: isinstance(given, Preprocessing),
        "a pp.Preprocessing, e.g. pp.Preprocessing(resize=224), which a transform of torchvision is not",
    ),
}
"""What an argument must be; `on_` is any callback."""


def require_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments of a run that would fail later, or mean nothing; None is a default."""
    for name, value in given.items():
        allowed, words = RULES.get("on_" if name.startswith("on_") else name, (None, ""))
        if allowed is not None and value is not None and not allowed(value):
            raise InputError(f"{name} must be {words}, not {value!r}")
    if given.get("resume") and given["folder"] is None:
        raise InputError("resume=True continues the run in a folder; give folder=… too")
