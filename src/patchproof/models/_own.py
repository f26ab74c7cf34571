"""Networks of the user's own: `package.module:factory` or `path/to/file.py:factory`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchproof.models._classifier import ImageClassifier, adopt, rewrap
from patchproof.models._state import first_line
from patchproof.models._timm import require_runs, wrap_timm
from patchproof.types import InputError, Size


def is_own(model: str) -> bool:
    """Whether a model is named by a factory rather than by an architecture."""
    return ":" in model


def build_own(spec: str, *, num_classes: int | None = None, input_size: Size | None = None) -> ImageClassifier:
    """What the factory returns, wrapped if it is not an ImageClassifier yet; its classes are counted.

    A plain module is given the [0, 1] images as they are (`adopt`); a factory that wants a normalisation returns an
    ImageClassifier, or a timm network, whose settings are then used.
    """
    factory = _find(spec)
    try:
        parameters = inspect.signature(factory).parameters.values()
        takes_classes = any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)
        module = factory(**{"num_classes": num_classes} if takes_classes and num_classes is not None else {})
    except Exception as error:  # the factory is the user's code
        raise InputError(f"{spec} failed when called ({type(error).__name__}: {first_line(error)})") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"{spec} must return a torch.nn.Module or an ImageClassifier, got {type(module).__name__}")
    module = module.to("cpu", torch.float32)  # what follows runs it once
    if isinstance(getattr(module, "pretrained_cfg", None), dict):
        classifier = wrap_timm(module, input_size=input_size)
    else:
        classifier = adopt(module, input_size=input_size or (224, 224), num_classes=1)
    size = input_size or classifier.input_size
    classifier = rewrap(classifier, architecture=spec, source=f"as made by {spec}", input_size=size)
    found = require_runs(classifier)
    if num_classes not in (None, found):
        raise InputError(
            f"{spec} gives {found} logits, but {num_classes} classes are expected; "
            "let the factory take num_classes, or give the data set it was made for"
        )
    names = classifier.class_names if found == classifier.num_classes else None
    return rewrap(classifier, num_classes=found, class_names=names)


def _find(spec: str) -> Callable[..., Any]:
    location, _, name = spec.rpartition(":")
    path = Path(location).expanduser()
    if location.endswith(".py") and not path.is_file():
        raise InputError(f"no file {path}; expected path/to/file.py:factory")
    try:
        if location.endswith(".py"):
            found = importlib.util.spec_from_file_location(f"patchproof_own_{path.stem}", path.resolve())
            module = importlib.util.module_from_spec(found)  # type: ignore[arg-type]
            sys.modules[module.__name__] = module  # dataclasses look themselves up there
            found.loader.exec_module(module)  # type: ignore[union-attr]
        else:
            module = importlib.import_module(location)
    except Exception as error:  # the module is the user's code
        raise InputError(
            f"{location!r} failed when imported ({type(error).__name__}: {first_line(error)}); "
            "expected package.module:factory or path/to/file.py:factory"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{location} has no function {name!r}; it has {', '.join(functions[:5]) or 'none'}")
    return factory
