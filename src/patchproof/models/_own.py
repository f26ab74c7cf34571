"""Networks of the user's own: `package.module:factory` or `path/to/file.py:factory`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from patchproof.models._classifier import ImageClassifier, rewrap
from patchproof.models._state import first_line
from patchproof.models._timm import require_runs, wrap_timm
from patchproof.types import InputError, Size


def is_own(model: str) -> bool:
    """Whether a model is named by a factory rather than by an architecture."""
    return ":" in model


def build_own(spec: str, *, num_classes: int | None = None, input_size: Size | None = None) -> ImageClassifier:
    """What the factory returns, wrapped if it is not an ImageClassifier yet.

    A plain module is given the [0, 1] images as they are (mean 0, std 1); a factory that wants a normalisation
    returns an ImageClassifier, or a timm network, whose settings are then used.
    """
    module = _call(_find(spec), spec, num_classes)
    # float32 on the CPU first: what follows runs the module once.
    module = module.to("cpu", torch.float32)
    classifier = rewrap(_wrap(module, input_size), architecture=spec, source=f"as made by {spec}")
    return _with_counted_classes(classifier, expected=num_classes)


def _find(spec: str) -> Callable[..., Any]:
    location, _, name = spec.rpartition(":")
    module = _from_file(Path(location)) if location.endswith(".py") else _from_package(location)
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{location} has no function {name!r}; it has {', '.join(functions[:5]) or 'none'}")
    return factory


def _from_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # the module is the user's code
        raise InputError(
            f"could not import {name!r} ({type(error).__name__}: {first_line(error)}); "
            "expected package.module:factory or path/to/file.py:factory"
        ) from error


def _from_file(path: Path) -> ModuleType:
    path = path.expanduser()
    if not path.is_file():
        raise InputError(f"no file {path}; expected path/to/file.py:factory")
    path = path.resolve()
    name = f"patchproof_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be imported; expected a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's code
        raise InputError(f"{path} failed when imported ({type(error).__name__}: {first_line(error)})") from error
    return module


def _call(factory: Callable[..., Any], spec: str, num_classes: int | None) -> nn.Module:
    arguments = {"num_classes": num_classes} if num_classes is not None and _takes_num_classes(factory) else {}
    try:
        module = factory(**arguments)
    except Exception as error:  # the factory is the user's code
        raise InputError(f"{spec} failed when called ({type(error).__name__}: {first_line(error)})") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"{spec} must return a torch.nn.Module or an ImageClassifier, got {type(module).__name__}")
    return module


def _takes_num_classes(factory: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)


def _wrap(module: nn.Module, input_size: Size | None) -> ImageClassifier:
    if isinstance(module, ImageClassifier):
        return rewrap(module, input_size=input_size or module.input_size)
    if isinstance(getattr(module, "pretrained_cfg", None), dict):
        return wrap_timm(module, input_size=input_size)
    size = input_size or (224, 224)
    return ImageClassifier(module, mean=(0.0,) * 3, std=(1.0,) * 3, input_size=size, num_classes=1)


def _with_counted_classes(classifier: ImageClassifier, *, expected: int | None) -> ImageClassifier:
    """The classifier with as many classes as it gives logits."""
    found = require_runs(classifier)
    if expected not in (None, found):
        raise InputError(
            f"{classifier.architecture} gives {found} logits, but {expected} classes are expected; "
            "let the factory take num_classes, or give the data set it was made for"
        )
    names = classifier.class_names if found == classifier.num_classes else None
    return rewrap(classifier, num_classes=found, class_names=names)
