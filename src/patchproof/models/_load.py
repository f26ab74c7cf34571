"""One door to every classifier: which network (`model`) and where its weights come from (`weights`)."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from patchproof.models._checkpoint import WEIGHTS, checkpoint_architecture, read_record, read_weights, settled
from patchproof.models._classifier import SETTINGS, ImageClassifier, rewrap, seeded
from patchproof.models._hub import fetching
from patchproof.models._own import build_own, is_own
from patchproof.models._small import build_small
from patchproof.models._state import SUFFIXES, first_line, head_classes, load_state, read_state, require_finite
from patchproof.models._timm import build_timm, split_name, tags_of, trained_class_names
from patchproof.models._zoo import build_zoo
from patchproof.types import InputError, PatchproofError, Size

HUB_PREFIXES = ("hf-hub:", "hf_hub:")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


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
    request = _Request(model, weights, _agreed_classes(num_classes, names), names, input_size, seed)
    with seeded(seed):
        return _finish(_loader(request)(request), request)


def load_checkpoint(folder: Path) -> ImageClassifier:
    """The classifier that `save_checkpoint` wrote into `folder`; runs no code that the folder names."""
    request = _Request(checkpoint_architecture(folder) or "", str(folder), None, None, None, 0)
    with seeded(request.seed):
        return _finish(_from_folder(request), request)


def replace_head(
    classifier: ImageClassifier, num_classes: int, class_names: Sequence[str] | None, *, seed: int
) -> ImageClassifier:
    """A copy of the classifier with a fresh last layer for other classes, drawn from `seed`."""
    module = copy.deepcopy(classifier.module)
    if not callable(getattr(module, "reset_classifier", None)):
        raise InputError(
            f"{classifier.architecture} has no method reset_classifier(num_classes), so its last layer cannot be "
            "replaced; add one, or build it with the right number of classes"
        )
    source = f"{classifier.source}, fresh head for {num_classes} classes"
    changed = rewrap(classifier, module=module, num_classes=num_classes, class_names=class_names, source=source)
    with seeded(seed):
        module.reset_classifier(num_classes)  # type: ignore[operator]
    module.to(classifier.mean.device, classifier.mean.dtype)
    return changed.train(classifier.training)


@dataclass(frozen=True)
class _Request:
    """What load_classifier was asked for."""

    model: str
    weights: str
    num_classes: int | None
    class_names: tuple[str, ...] | None
    input_size: Size | None
    seed: int

    @property
    def path(self) -> Path:
        return Path(self.weights).expanduser()

    @property
    def from_timm(self) -> bool:
        return self.model != "small" and not is_own(self.model)


def _agreed_classes(num_classes: int | None, names: tuple[str, ...] | None) -> int | None:
    if num_classes is None:
        return None if names is None else len(names)
    if names is not None and len(names) != num_classes:
        raise InputError(f"num_classes is {num_classes}, but {len(names)} class names are given; give as many")
    return num_classes


def _loader(request: _Request) -> Callable[[_Request], ImageClassifier]:
    words = {"random": _from_seed, "pretrained": _from_default, "zoo": _from_zoo}
    if request.model.startswith(HUB_PREFIXES):
        raise InputError(f"{request.model} is a hub id: give it as the weights, and the architecture as the model")
    if request.weights in words:
        return words[request.weights]
    if request.weights.startswith(HUB_PREFIXES):
        return _from_hub
    if request.from_timm and request.weights in tags_of(split_name(request.model)[0]):
        return _from_tag
    if settled(request.path).is_dir():
        return _from_folder
    if request.path.is_file() or request.path.suffix.lower() in SUFFIXES:
        return _from_file
    if HUB_ID.fullmatch(request.weights):
        return _from_hub
    raise InputError(_unknown_weights(request))


def _build(request: _Request, *, num_classes: int | None, **timm_or_small: Any) -> ImageClassifier:
    """The architecture with fresh weights."""
    if is_own(request.model):
        return build_own(request.model, num_classes=num_classes, input_size=request.input_size)
    if request.model == "small":
        timm_or_small.pop("model_args", None)
        return build_small(num_classes=num_classes, input_size=request.input_size, **timm_or_small)
    full_name = ".".join(filter(None, split_name(request.model)))
    return build_timm(full_name, num_classes=num_classes or 1000, input_size=request.input_size, **timm_or_small)


def _from_seed(request: _Request) -> ImageClassifier:
    return rewrap(_build(request, num_classes=request.num_classes), source=f"random weights, seed {request.seed}")


def _from_zoo(request: _Request) -> ImageClassifier:
    if not request.from_timm:
        raise InputError(f"the weights `zoo` are for tf_efficientnet_lite0, got model {request.model!r}")
    return build_zoo(request.model, input_size=request.input_size)


def _from_default(request: _Request) -> ImageClassifier:
    """`pretrained`: what timm takes by default, or what a factory returned."""
    if is_own(request.model):
        return _build(request, num_classes=request.num_classes)
    if request.model == "small":
        raise InputError("`small` has no pretrained weights; train it (`patchproof train`), or give `random` or a file")
    return _from_timm_tag(request, split_name(request.model)[1])


def _from_tag(request: _Request) -> ImageClassifier:
    named = request.model.partition(".")[2]
    if named not in ("", request.weights):
        raise InputError(f"the model names the tag {named}, the weights {request.weights}; give one of them")
    return _from_timm_tag(request, request.weights)


def _from_timm_tag(request: _Request, tag: str) -> ImageClassifier:
    from timm.models import get_pretrained_cfg

    name, tags = split_name(request.model)[0], tags_of(split_name(request.model)[0])
    if not tags or tag not in ("", *tags):
        raise InputError(_unknown_weights(request))
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
    state = read_state(request.path)
    classifier = _build(request, num_classes=request.num_classes)
    if request.num_classes is None and (found := head_classes(classifier.module, state)):
        classifier = _build(request, num_classes=found)
    load_state(classifier.module, state, where=str(request.path))
    return rewrap(classifier, source=f"file {request.path}")


def _from_folder(request: _Request) -> ImageClassifier:
    folder = settled(request.path)
    record = read_record(folder)
    _require_same_architecture(request.model, record["architecture"], where=str(request.path))
    _require_head(str(request.path), record["num_classes"], request)
    request = replace(request, input_size=request.input_size or tuple(record["input_size"]))
    classifier = _rebuild(request, record)
    load_state(classifier.module, read_weights(folder), where=str(folder / WEIGHTS))
    return rewrap(classifier, **_recorded(record, request))


def _rebuild(request: _Request, record: Mapping[str, Any]) -> ImageClassifier:
    arguments = {"channels": len(record["mean"]), "model_args": record["model_args"]}
    try:
        return _build(request, num_classes=record["num_classes"], **arguments)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # the arguments are anybody's
        if isinstance(error, PatchproofError):
            raise
        raise InputError(f"{request.path} cannot be rebuilt ({first_line(error)}); take another checkpoint") from error


def _recorded(record: Mapping[str, Any], request: _Request) -> dict[str, Any]:
    kept = {name: record[name] for name in ("mean", "std", *SETTINGS)}
    return kept | {"input_size": request.input_size, "source": f"checkpoint {request.path}"}


def _finish(classifier: ImageClassifier, request: _Request) -> ImageClassifier:
    require_finite(classifier.module, where=classifier.source)
    if request.num_classes not in (None, classifier.num_classes):
        raise InputError(_other_head(classifier.source, classifier.num_classes, request.num_classes))
    if request.class_names is not None:
        _require_same_order(request.class_names, classifier)
        classifier = rewrap(classifier, class_names=request.class_names)
    return classifier.to("cpu", torch.float32).eval()


def _require_same_order(names: tuple[str, ...], classifier: ImageClassifier) -> None:
    own = classifier.class_names
    if own is not None and names != own and set(names) == set(own):
        raise InputError(
            f"{classifier.source} has the same class names in another order (first {own[0]}, not {names[0]}): "
            "leave class_names out and use match_labels"
        )


def _require_head(where: str, found: int, request: _Request) -> None:
    """Before anything is fetched or read: the head has the classes that are asked for, or any at all."""
    if found < 1:
        raise InputError(f"{where} has no classification head (it gives features); choose weights that have one")
    if request.num_classes not in (None, found):
        raise InputError(_other_head(where, found, request.num_classes))


def _other_head(where: str, found: int, wanted: int | None) -> str:
    return (
        f"{where} has {found} classes, the data set has {wanted}: fine-tune it first (`patchproof train`), "
        "or leave num_classes out and match the classes by name"
    )


def _require_same_architecture(asked: str, found: str, *, where: str) -> None:
    if asked != found and _canonical(asked) != _canonical(found):
        raise InputError(f"{where} holds weights for {found}, but the model is {asked}; name the model {found}")


def _canonical(model: str) -> str:
    """One name for an architecture: without tag, without the folder that a factory's file lies in."""
    if is_own(model):
        return Path(model).name
    return model if model == "small" else split_name(model)[0]


def _unknown_weights(request: _Request) -> str:
    tags = tags_of(split_name(request.model)[0]) if request.from_timm else []
    near = difflib.get_close_matches(request.weights, tags, n=3, cutoff=0.3) or tags[:3]
    listed = f"`pretrained`, a timm tag (e.g. {', '.join(near)}), " if near else ""
    return (
        f"unknown weights {request.weights!r} for {request.model}: expected `random`, {listed}"
        f"a hub id (org/name), a file ({' '.join(SUFFIXES)}) or a checkpoint folder"
    )
