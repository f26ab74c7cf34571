"""Networks of the timm library: their names, tags and settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from typing import Any, get_args

import torch
from torch import nn

from patchproof.models._classifier import ImageClassifier
from patchproof.models._state import first_line
from patchproof.types import InputError, Interpolation, Size

# Arguments of timm.create_model that decide where weights are read from: never taken from a file.
RESERVED_ARGS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
WORDNET_ID = re.compile(r"n\d{8}")
IMAGENET_TAG = re.compile(r"(^|_)in1k(_|$)")


def split_name(model: str) -> tuple[str, str]:
    """(architecture, tag or "") of a timm name; names that timm has given up are read as their successors."""
    import timm
    from timm.models import get_deprecated_models

    name, _, tag = model.partition(".")
    name, _, successor_tag = (get_deprecated_models().get(name) or name).partition(".")
    if not timm.is_model(name):
        raise InputError(_unknown_model(model, [*timm.list_models(), "small"]))
    if tag and f"{name}.{tag}" not in timm.list_models(name, include_tags=True):
        raise InputError(f"{name} has no tag {tag!r} in timm; its weights: {', '.join(tags_of(name)) or 'none'}")
    return name, tag or successor_tag


def list_models(pattern: str = "") -> list[str]:
    """Names that match a wildcard, `small` and timm's."""
    import timm

    names = ["small", *timm.list_models()]
    return [name for name in names if fnmatch(name, pattern or "*")]


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
    arguments = dict(model_args or {})
    input_size = input_size or _pair(arguments.get("img_size"))
    channels = channels or arguments.get("in_chans")
    others = {name: value for name, value in arguments.items() if name not in ("img_size", "in_chans", "num_classes")}
    module = _create(model, input_size, num_classes=num_classes, in_chans=channels, pretrained=pretrained, **others)
    classifier = wrap_timm(module, input_size=input_size, channels=channels, model_args=others)
    if input_size not in (None, _native_size(module)):
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
        mean=_per_channel(cfg["mean"], channels),
        std=_per_channel(cfg["std"], channels),
        input_size=input_size or _native_size(module),
        num_classes=int(getattr(module, "num_classes", cfg["num_classes"])),
        interpolation=interpolation if interpolation in get_args(Interpolation) else "bicubic",
        crop_pct=cfg.get("crop_pct") or 1.0,
        architecture=cfg.get("architecture"),
        model_args=model_args,
    )


def trained_class_names(classifier: ImageClassifier) -> tuple[str, ...] | None:
    """Names of the classes that a timm network was trained on, where timm knows: WordNet ids for ImageNet-1k."""
    cfg: dict[str, Any] = classifier.module.pretrained_cfg  # type: ignore[assignment]
    labels = cfg.get("label_names")
    if isinstance(labels, (list, tuple)) and len(set(labels)) == classifier.num_classes:
        return tuple(map(str, labels))
    imagenet = classifier.num_classes == 1000 and IMAGENET_TAG.search(cfg.get("tag") or "")
    return imagenet_wnids() if imagenet else None


def imagenet_wnids() -> tuple[str, ...]:
    """The 1000 WordNet ids of ImageNet-1k in the order of the classes (sorted)."""
    return tuple(_imagenet().label_names())


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
    shape = (1, len(classifier.fill), *classifier.input_size)
    wanted = "x".join(map(str, shape))
    was_training = classifier.training
    try:
        with torch.no_grad():
            logits = classifier.eval().module(torch.zeros(shape))  # zero = the mean colour, normalised
    except Exception as error:  # the network is anybody's code
        raise InputError(
            f"{classifier.architecture} cannot take images of {wanted} ({first_line(error)}); "
            "give the input size it was made for"
        ) from error
    finally:
        classifier.train(was_training)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise InputError(f"{classifier.architecture} must give logits (b classes) for images of {wanted}, got {got}")
    return logits.shape[1]


def _create(model: str, input_size: Size | None, **arguments: Any) -> nn.Module:
    import timm

    if input_size is not None:
        try:
            return timm.create_model(model, img_size=input_size, **arguments)
        except TypeError as error:  # a network that takes any size has no such argument
            if "img_size" not in str(error):
                raise
        except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
            raise InputError(
                f"{model} cannot be built for an input size of {input_size[0]}x{input_size[1]} ({first_line(error)}); "
                "give a multiple of its patch size, or leave the input size out"
            ) from error
    return timm.create_model(model, **arguments)


def _native_size(module: nn.Module) -> Size:
    cfg: dict[str, Any] = module.pretrained_cfg  # type: ignore[assignment]
    return (int(cfg["input_size"][1]), int(cfg["input_size"][2]))


def _pair(size: int | Sequence[int] | None) -> Size | None:
    if size is None or isinstance(size, int):
        return None if size is None else (size, size)
    return (int(size[0]), int(size[1]))


def _per_channel(values: Sequence[float], channels: int | None) -> tuple[float, ...]:
    """One value a channel; a number of channels that timm has no values for takes their average."""
    if channels in (None, len(values)):
        return tuple(values)
    return (sum(values) / len(values),) * int(channels or 0)


def _unknown_model(model: str, known: list[str]) -> str:
    near = difflib.get_close_matches(model.partition(".")[0], known, n=4, cutoff=0.5)
    nearest = f"; nearest: {', '.join(near)}" if near else ""
    return f"unknown model {model!r}: expected a timm name, `small`, or package.module:factory{nearest}"
