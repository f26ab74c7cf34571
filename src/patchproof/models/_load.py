"""One door to every classifier: which network (`model`) and where its weights come from (`weights`)."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from patchproof.models import _state
from patchproof.models._build import (
    ZOO,
    ZOO_PACKAGE,
    build_own,
    build_timm,
    build_zoo,
    is_own,
    split_name,
    tags_of,
    trained_class_names,
)
from patchproof.models._checkpoint import WEIGHTS, checkpoint_architecture, read_record, read_weights, settled
from patchproof.models._classifier import ImageClassifier, rewrap, seeded, settings
from patchproof.models._hub import fetching
from patchproof.models._small import build_small
from patchproof.types import InputError, PatchproofError, Size

HUB_PREFIXES = ("hf-hub:", "hf_hub:")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True)
class _Request:
    """What load_classifier was asked for."""

    model: str
    weights: str
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    input_size: Size | None = None
    seed: int = 0

    @property
    def path(self) -> Path:
        return Path(self.weights).expanduser()


def load_classifier(
    model: str,
    weights: str,
    *,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    input_size: Size | None = None,
    seed: int = 0,
) -> ImageClassifier:
    """The network `model` with `weights`: in eval mode, on the CPU, in float32; no random state is touched.

    `model`: a timm name, `small`, or `package.module:factory` / `path/to/file.py:factory`.
    `weights`: `random` (from `seed`), `pretrained`, a timm tag, a hub id (`org/name`), `zoo`, a file, or a folder
    that `save_checkpoint` wrote. Trained weights keep their own head; `num_classes` must then agree with it.
    """
    names = None if class_names is None else tuple(class_names)
    if names is not None and num_classes not in (None, len(names)):
        raise InputError(f"num_classes is {num_classes}, but {len(names)} class names are given; give as many")
    classes = num_classes if names is None else len(names)
    request = _Request(model, weights, classes, names, input_size, seed)
    with seeded(seed):
        return _finish(_find(request), request)


def load_checkpoint(folder: Path) -> ImageClassifier:
    """The classifier that `save_checkpoint` wrote into `folder`; runs no code that the folder names."""
    request = _Request(checkpoint_architecture(folder) or "", str(folder))
    with seeded(request.seed):
        return _finish(_from_folder(request), request)


def known_weights(model: str) -> str | None:
    """The weights that a model has by itself: `zoo` or `pretrained`; None for those that have to be trained."""
    if is_own(model):
        return "pretrained"
    if model == "small":
        return None
    name, tag = split_name(model)
    if name == ZOO and not tag and importlib.util.find_spec(ZOO_PACKAGE):
        return "zoo"
    return "pretrained" if tags_of(name) else None


def replace_head(
    classifier: ImageClassifier, num_classes: int, class_names: Sequence[str] | None, *, seed: int
) -> ImageClassifier:
    """A copy of the classifier with a fresh last layer for other classes, drawn from `seed`."""
    module: Any = copy.deepcopy(classifier.module)
    if not callable(getattr(module, "reset_classifier", None)):
        raise InputError(
            f"{classifier.architecture} has no method reset_classifier(num_classes), so its last layer cannot be "
            "replaced; add one, or build it with the right number of classes"
        )
    source = f"{classifier.source}, fresh head for {num_classes} classes"
    changed = rewrap(classifier, module=module, num_classes=num_classes, class_names=class_names, source=source)
    with seeded(seed):
        module.reset_classifier(num_classes)
    module.to(classifier.mean.device, classifier.mean.dtype)
    return changed.train(classifier.training)


def _find(request: _Request) -> ImageClassifier:
    """What `weights` means: the words first, then timm's tags, folders and files that exist, and hub ids."""
    model, weights = request.model, request.weights
    if model.startswith(HUB_PREFIXES):
        raise InputError(f"{model} is a hub id: give it as the weights, and the architecture as the model")
    if weights == "random":
        classifier = _build(request, num_classes=request.num_classes)
        return rewrap(classifier, source=f"random weights, seed {request.seed}")
    if weights == "pretrained" and is_own(model):
        return _build(request, num_classes=request.num_classes)
    if weights == "pretrained" and model == "small":
        raise InputError("`small` has no pretrained weights; train it (`patchproof train`), or give `random` or a file")
    from_timm = model != "small" and not is_own(model)
    if weights == "zoo":
        if not from_timm:
            raise InputError(f"the weights `zoo` are for {ZOO}, got model {model!r}")
        return build_zoo(model, input_size=request.input_size)
    tags = tags_of(split_name(model)[0]) if from_timm else []
    if weights in tags or (weights == "pretrained" and tags):
        return _from_tag(request)
    if weights.startswith(HUB_PREFIXES):
        return _from_hub(request)
    if settled(request.path).is_dir():
        return _from_folder(request)
    if request.path.is_file() or request.path.suffix.lower() in _state.SUFFIXES:
        return _from_file(request)
    if HUB_ID.fullmatch(weights):
        return _from_hub(request)
    near = difflib.get_close_matches(weights, tags, n=3, cutoff=0.3) or tags[:3]
    listed = f"`pretrained`, a timm tag (e.g. {', '.join(near)}), " if near else ""
    raise InputError(
        f"unknown weights {weights!r} for {model}: expected `random`, {listed}a hub id (org/name), "
        f"a file ({' '.join(_state.SUFFIXES)}) or a checkpoint folder"
    )


def _build(request: _Request, *, num_classes: int | None, **timm_or_small: Any) -> ImageClassifier:
    """The architecture with fresh weights."""
    if is_own(request.model):
        return build_own(request.model, num_classes=num_classes, input_size=request.input_size)
    if request.model == "small":
        timm_or_small.pop("model_args", None)
        return build_small(num_classes=num_classes, input_size=request.input_size, **timm_or_small)
    full_name = ".".join(filter(None, split_name(request.model)))
    return build_timm(full_name, num_classes=num_classes or 1000, input_size=request.input_size, **timm_or_small)


def _from_tag(request: _Request) -> ImageClassifier:
    """`pretrained` (what timm takes by default, or the tag of the model's name) or a tag."""
    from timm.models import get_pretrained_cfg

    name, tag = split_name(request.model)
    named = request.model.partition(".")[2]
    if request.weights != "pretrained":
        tag = request.weights
        if named not in ("", tag):
            raise InputError(f"the model names the tag {named}, the weights {tag}; give one of them")
    full_name = f"{name}.{tag}" if tag else name
    cfg: Any = get_pretrained_cfg(full_name)
    _require_head(full_name, cfg.num_classes, request)
    with fetching(cfg.hf_hub_id or cfg.url):
        classifier = build_timm(full_name, input_size=request.input_size, pretrained=True)
    return rewrap(classifier, class_names=trained_class_names(classifier), source=f"timm {full_name}")


def _from_hub(request: _Request) -> ImageClassifier:
    from timm.models import load_model_config_from_hf

    repo = request.weights.removeprefix(HUB_PREFIXES[0]).removeprefix(HUB_PREFIXES[1])
    with fetching(repo):
        cfg, architecture, arguments = load_model_config_from_hf(repo)
        _require_same_architecture(request.model, architecture, where=repo)
        _require_head(repo, cfg.get("num_classes", 1000), request)
        options = {"input_size": request.input_size, "model_args": arguments, "pretrained": True}
        classifier = build_timm(f"hf-hub:{repo}", **options)
    return rewrap(classifier, class_names=trained_class_names(classifier), source=f"Hugging Face Hub {repo}")


def _from_file(request: _Request) -> ImageClassifier:
    state = _state.read_state(request.path)
    classifier = _build(request, num_classes=request.num_classes)
    if request.num_classes is None and (found := _state.head_classes(classifier.module, state)):
        classifier = _build(request, num_classes=found)
    _state.load_state(classifier.module, state, where=str(request.path))
    return rewrap(classifier, source=f"file {request.path}")


def _from_folder(request: _Request) -> ImageClassifier:
    folder = settled(request.path)
    record = read_record(folder)
    _require_same_architecture(request.model, record["architecture"], where=str(request.path))
    _require_head(str(request.path), record["num_classes"], request)
    request = replace(request, input_size=request.input_size or tuple(record["input_size"]))
    arguments = {"channels": len(record["mean"]), "model_args": record["model_args"]}
    try:
        classifier = _build(request, num_classes=record["num_classes"], **arguments)
    except PatchproofError:
        raise
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # the arguments are anybody's
        raise InputError(
            f"{request.path} cannot be rebuilt ({_state.first_line(error)}); take another checkpoint"
        ) from error
    _state.load_state(classifier.module, read_weights(folder), where=str(folder / WEIGHTS))
    recorded = {name: record[name] for name in settings(classifier)}
    return rewrap(classifier, **recorded | {"input_size": request.input_size, "source": f"checkpoint {request.path}"})


def _finish(classifier: ImageClassifier, request: _Request) -> ImageClassifier:
    _state.require_finite(classifier.module, where=classifier.source)
    _require_head(classifier.source, classifier.num_classes, request)
    names, own = request.class_names, classifier.class_names
    if names is not None:
        if own is not None and names != own and set(names) == set(own):
            raise InputError(
                f"{classifier.source} has the same class names in another order (first {own[0]}, not {names[0]}): "
                "leave class_names out and use match_labels"
            )
        classifier = rewrap(classifier, class_names=names)
    return classifier.to("cpu", torch.float32).eval()


def _require_head(where: str, found: int, request: _Request) -> None:
    """Before anything is fetched or read: the head has the classes that are asked for, or any at all."""
    if found < 1:
        raise InputError(f"{where} has no classification head (it gives features); choose weights that have one")
    if request.num_classes not in (None, found):
        raise _state.other_classes(where, found, request.num_classes)


def _require_same_architecture(asked: str, found: str, *, where: str) -> None:
    def canonical(model: str) -> str:
        """One name for an architecture: without tag, without the folder that a factory's file is in."""
        if is_own(model):
            return Path(model).name
        return model if model == "small" else split_name(model)[0]

    if asked != found and canonical(asked) != canonical(found):
        raise InputError(f"{where} holds weights for {found}, but the model is {asked}; name the model {found}")
