"""Architectures by name: the package's own networks, timm's with their tags and settings, and the user's factories."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from patchproof.models._classifier import ImageClassifier, adopt, rewrap
from patchproof.models._networks import NETWORKS, is_own
from patchproof.types import InputError, Interpolation, Size, failure, first_line, note

WORDNET_ID = re.compile(r"n\d{8}")


def list_models(pattern: str = "") -> list[str]:
    """Names of the package's own and timm's architectures that match a wildcard."""
    import timm

    return [name for name in (*NETWORKS, *timm.list_models()) if fnmatch(name, pattern or "*")]


def split_name(model: str) -> tuple[str, str]:
    """Return (architecture, tag or ""). A name that timm has deprecated becomes its successor; a factory loses its
    folder."""
    if is_own(model) or model in NETWORKS:
        return Path(model).name, ""
    import timm
    from timm.models import get_deprecated_models

    if model.endswith(".py"):
        raise InputError(f"{model} is a file: name the function in it that returns the network too, e.g. {model}:build")
    name, _, tag = model.partition(".")
    name, _, successor_tag = (get_deprecated_models().get(name) or name).partition(".")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, [*timm.list_models(), *NETWORKS], n=4, cutoff=0.5)
        nearest = f"; nearest: {', '.join(near)}" if near else ""
        raise InputError(
            f"unknown model {model!r}: expected a timm name, {', '.join(NETWORKS)}, or package.module:factory{nearest}"
        )
    if tag and f"{name}.{tag}" not in timm.list_models(name, include_tags=True):
        raise InputError(f"{name} has no tag {tag!r} in timm; its weights: {', '.join(tags_of(name)) or 'none'}")
    return name, tag or successor_tag


def tags_of(architecture: str) -> list[str]:
    """Tags under which timm has weights for an architecture."""
    import timm

    return [name.partition(".")[2] for name in timm.list_pretrained(architecture)]


def build(
    model: str, num_classes: int | None, input_size: Size | None, model_args: Mapping[str, Any] | None = None
) -> ImageClassifier:
    """Build the architecture with fresh weights; None stands for its own number of classes or input size."""
    if is_own(model):
        return build_own(model, num_classes, input_size)
    if model not in NETWORKS:
        name = ".".join(filter(None, split_name(model)))
        return build_timm(name, num_classes=num_classes or 1000, input_size=input_size, model_args=model_args)
    known = NETWORKS[model]
    sized = {"input_size": input_size or known.input_size} if known.sized else {}
    module = known.make(num_classes or 10, **sized)
    cfg = {"architecture": model, "interpolation": "bilinear", "input_size": (3, *known.input_size)}
    return wrap(module, {**cfg, "mean": known.mean, "std": known.std}, input_size=input_size)


def build_timm(
    model: str,
    *,
    num_classes: int | None = None,
    input_size: Size | None = None,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
) -> ImageClassifier:
    """Build a timm network with fresh weights or those of its tag; its settings come from timm's `pretrained_cfg`."""
    import timm

    arguments = dict(model_args or {})
    size, channels = arguments.pop("img_size", None), arguments.pop("in_chans", None)
    arguments.pop("num_classes", None)
    if input_size is None and size:
        input_size = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": channels, "pretrained": pretrained, **arguments}
    try:
        sized: dict[str, Any] = {} if input_size is None else {"img_size": input_size}
        module = timm.create_model(model, **options, **sized)
    except TypeError as error:
        if input_size is None or "img_size" not in str(error):
            raise
        module = timm.create_model(model, **options)  # networks that take any size have no such argument
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        if input_size is None:
            raise
        raise InputError(
            f"{model} cannot be built for an input size of {input_size[0]}x{input_size[1]} ({first_line(error)}); "
            "give a multiple of its patch size, or leave the input size out"
        ) from error
    return wrap(module, module.pretrained_cfg, input_size=input_size, channels=channels, model_args=arguments)


def wrap(
    module: nn.Module,
    cfg: Any,
    *,
    input_size: Size | None = None,
    channels: int | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> ImageClassifier:
    """Wrap a module with the settings of a timm `pretrained_cfg`; an input size other than the one there is tried once.

    For another number of channels, mean and std are averaged.
    """
    mean, std = cfg["mean"], cfg["std"]
    if channels is not None and channels != len(mean):
        mean, std = ((sum(values) / len(values),) * channels for values in (mean, std))
    interpolation = cfg.get("interpolation")
    native = tuple(cfg["input_size"][1:])
    classifier = ImageClassifier(
        module,
        mean=mean,
        std=std,
        input_size=input_size or native,
        num_classes=int(getattr(module, "num_classes", cfg.get("num_classes"))),
        interpolation=interpolation if interpolation in get_args(Interpolation) else "bicubic",
        crop_pct=cfg.get("crop_pct") or 1.0,
        architecture=cfg.get("architecture"),
        model_args=model_args,
    )
    if classifier.input_size != native:
        count_logits(classifier)
    return classifier


def count_logits(classifier: ImageClassifier) -> int:
    """Return the number of logits for a blank image of the classifier's input size; InputError if it cannot run."""
    shape = (1, len(classifier.shift), *classifier.input_size)
    wanted = "x".join(map(str, shape))
    try:
        with torch.no_grad():
            logits = classifier.eval().module(torch.zeros(shape))  # zero = the mean colour, normalised
    except Exception as error:  # the network may be the user's code
        raise InputError(
            f"{classifier.architecture} cannot take images of {wanted}: {failure(error)}; "
            "give the input size it was made for"
        ) from error
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InputError(f"{classifier.architecture} must give logits (b classes) for images of {wanted}, got {got}")
    return logits.shape[1]


def build_own(spec: str, num_classes: int | None, input_size: Size | None) -> ImageClassifier:
    """Call the factory `package.module:factory` or `path/to/file.py:factory`, wrap what it returns, count its classes.

    A plain module is given the [0, 1] images as they are (`adopt`). A factory that wants a normalisation returns an
    ImageClassifier, or a timm network, whose settings are then used.
    """
    location, _, name = spec.rpartition(":")
    path = Path(location).expanduser()
    expected = "expected package.module:factory or path/to/file.py:factory"
    if location.endswith(".py") and not path.is_file():
        raise InputError(f"no file {path}; {expected}")
    try:
        if location.endswith(".py"):
            found = importlib.util.spec_from_file_location(f"patchproof_own_{path.stem}", path.resolve())
            code = importlib.util.module_from_spec(found)  # type: ignore[arg-type]
            sys.modules[code.__name__] = code  # dataclasses look themselves up there
            found.loader.exec_module(code)  # type: ignore[union-attr]
        else:
            code = importlib.import_module(location)
    except Exception as error:  # the module is the user's code
        raise InputError(f"{location!r} failed when imported: {failure(error)}; {expected}") from error
    factory: Any = getattr(code, name, None)
    if not callable(factory):
        functions = [key for key, value in vars(code).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{location} has no function {name!r}; it has {', '.join(functions[:5]) or 'none'}")
    try:
        parameters = inspect.signature(factory).parameters.values()
        takes_classes = any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)
        module = factory(num_classes=num_classes) if takes_classes and num_classes is not None else factory()
    except Exception as error:  # the factory is the user's code
        raise InputError(f"{spec} failed when called: {failure(error)}") from error
    if not isinstance(module, nn.Module):
        raise InputError(f"{spec} must return a torch.nn.Module or an ImageClassifier, got {type(module).__name__}")
    module = module.to("cpu", torch.float32)  # it is run below
    cfg = getattr(module, "pretrained_cfg", None)
    if isinstance(cfg, dict):
        classifier = wrap(module, cfg)
    else:
        if input_size is None and not isinstance(module, ImageClassifier):
            note(f"{spec} says no input size: 224×224 is assumed; give input_size")
        classifier = adopt(module, input_size=input_size or (224, 224), num_classes=1)
    size = input_size or classifier.input_size
    classifier = rewrap(classifier, architecture=spec, source="weights as its factory makes them", input_size=size)
    classes = count_logits(classifier)
    if num_classes not in (None, classes):
        raise InputError(
            f"{spec} gives {classes} logits, but {num_classes} classes are expected; "
            "let the factory take num_classes, or give the data set it was made for"
        )
    names = classifier.class_names if classes == classifier.num_classes else None
    return rewrap(classifier, num_classes=classes, class_names=names)


def wordnet_words(name: str) -> str | None:
    """The English word for a WordNet id of ImageNet, e.g. `tench` for n01440764; None for any other name."""
    if not WORDNET_ID.fullmatch(name) or name not in imagenet_info().label_names():
        return None
    return str(imagenet_info().label_name_to_description(name)).split(",")[0]


@cache
def imagenet_info() -> Any:
    """timm's names of the ImageNet classes, in the order of their labels."""
    from timm.data.imagenet_info import ImageNetInfo

    return ImageNetInfo("imagenet-1k")
