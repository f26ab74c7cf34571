"""One door to every classifier: which network (`model`) and where its weights come from (`weights`)."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from patchproof.geometry import whole_size
from patchproof.models import _build
from patchproof.models._build import ZOO, build_network, build_timm, split_name, tags_of, trained_class_names
from patchproof.models._classifier import ImageClassifier, rewrap, seeded, settings
from patchproof.models._files import (
    SUFFIXES,
    WEIGHTS,
    checkpoint_architecture,
    first_line,
    head_classes,
    load_state,
    other_classes,
    read_record,
    read_state,
    read_weights,
    require_finite,
    settled,
)
from patchproof.models._networks import NETWORKS, is_own
from patchproof.types import InputError, PatchproofError, Size

HUB_PREFIX = re.compile(r"hf[-_]hub:")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
HUB_ANSWERS_WITHIN_SECONDS = 5.0

EMBEDDED = "embedded"
"""The weights of `small` that are part of the package: trained on `fashion-mini`, for demonstrations."""
EMBEDDED_SOURCE = "the embedded demonstration network"


@dataclass(frozen=True)
class _Request:
    """What load_classifier was asked for."""

    model: str
    weights: str
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    input_size: Size | None = None
    seed: int = 0
    drop_tokens: bool = False

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
    drop_tokens: bool = False,
) -> ImageClassifier:
    """The network `model` with `weights`: in eval mode, on the CPU, in float32; no random state is touched.

    `model`: a timm name, one of the package's own (`small`, `bagnet9`, …), or `package.module:factory` /
    `path/to/file.py:factory`.
    `weights`: `random` (from `seed`), `pretrained`, a timm tag, a hub id (`org/name`), `zoo`, `embedded` (of `small`),
    a file, or a folder that `save_checkpoint` wrote. Trained weights keep their own head; `num_classes` must then agree
    with it. `drop_tokens`: a vision transformer is shown only the tokens that a mask leaves visible; a checkpoint that
    was trained so is loaded so.
    """
    names = None if class_names is None else tuple(class_names)
    if names is not None and num_classes not in (None, len(names)):
        raise InputError(f"num_classes is {num_classes}, but {len(names)} class names are given; give as many")
    classes = num_classes if names is None else len(names)
    size = None if input_size is None else whole_size(input_size, "input_size")
    request = _Request(model, weights, classes, names, size, seed, drop_tokens)
    with seeded(seed):
        return _finish(_find(request), request)


def load_checkpoint(folder: Path) -> ImageClassifier:
    """The classifier that `save_checkpoint` wrote into `folder`; runs no code that the folder names."""
    request = _Request(checkpoint_architecture(folder) or "", str(folder))
    with seeded(request.seed):
        return _finish(_from_folder(request), request)


def embedded_checkpoint() -> Path:
    """The checkpoint folder of the demonstration network."""
    return Path(__file__).parents[1] / "embedded" / "hardened"


def architecture_of(weights: str) -> str | None:
    """The network that weights are of, where they say so: a checkpoint folder, or a word; None for all others."""
    words = {"random": "small", EMBEDDED: "small", "zoo": "tf_efficientnet_lite0"}
    return words.get(weights) or checkpoint_architecture(Path(weights))


def known_weights(model: str) -> str | None:
    """The weights that a model has by itself: `zoo`, `embedded` or `pretrained`; None where it has to be trained."""
    if is_own(model):
        return "pretrained"
    if model in NETWORKS:
        return EMBEDDED if model == "small" else None
    name, tag = split_name(model)
    if name in ZOO and not tag and importlib.util.find_spec(ZOO[name]):
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
    model, weights, path = request.model, request.weights, request.path
    if HUB_PREFIX.match(model):
        raise InputError(f"{model} is a hub id: give it as the weights, and the architecture as the model")
    if weights == "random":
        return rewrap(_fresh(request, request.num_classes), source=f"random weights, seed {request.seed}")
    if weights == "pretrained" and is_own(model):
        return _fresh(request, request.num_classes)
    if weights == "pretrained" and model in NETWORKS:
        raise InputError(
            f"`{model}` has no pretrained weights; train it (`patchproof train`), or give `random`, a file or a folder"
        )
    if weights == EMBEDDED:
        return rewrap(_from_folder(replace(request, weights=str(embedded_checkpoint()))), source=EMBEDDED_SOURCE)
    if weights == "zoo":
        return _build.build_zoo(model, input_size=request.input_size)
    tags = [] if model in NETWORKS or is_own(model) else tags_of(split_name(model)[0])
    if weights in tags or (weights == "pretrained" and tags):
        return _from_tag(request)
    if HUB_PREFIX.match(weights):
        return _from_hub(request)
    if settled(path).is_dir():
        return _from_folder(request)
    if path.is_file() or path.suffix.lower() in SUFFIXES:
        state, classes = read_state(path), request.num_classes
        classifier = _fresh(request, classes)
        if classes is None and (found := head_classes(classifier.module, state)):
            classifier = _fresh(request, found)
        load_state(classifier.module, state, where=str(path))
        return rewrap(classifier, source=f"file {path}")
    if HUB_ID.fullmatch(weights):
        return _from_hub(request)
    near = difflib.get_close_matches(weights, tags, n=3, cutoff=0.3) or tags[:3]
    listed = f"`pretrained`, a timm tag (e.g. {', '.join(near)}), " if near else ""
    listed += "`zoo`, " if model in ZOO else ""
    raise InputError(
        f"unknown weights {weights!r} for {model}: expected `random`, {listed}a hub id (org/name), "
        f"a file ({' '.join(SUFFIXES)}) or a checkpoint folder"
    )


def _fresh(
    request: _Request, num_classes: int | None, *, channels: int | None = None, model_args: Any = None
) -> ImageClassifier:
    """The architecture with fresh weights."""
    model, size = request.model, request.input_size
    if is_own(model):
        return _build.build_own(model, num_classes=num_classes, input_size=size)
    if model in NETWORKS:
        return build_network(model, num_classes=num_classes, input_size=size, channels=channels)
    name, classes = ".".join(filter(None, split_name(model))), num_classes or 1000
    return build_timm(name, num_classes=classes, input_size=size, channels=channels, model_args=model_args)


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
    with _fetching(cfg.hf_hub_id or cfg.url):
        classifier = build_timm(full_name, input_size=request.input_size, pretrained=True)
    return rewrap(classifier, class_names=trained_class_names(classifier), source=f"timm {full_name}")


def _from_hub(request: _Request) -> ImageClassifier:
    from timm.models import load_model_config_from_hf

    repo = HUB_PREFIX.sub("", request.weights, count=1)
    with _fetching(repo):
        cfg, architecture, arguments = load_model_config_from_hf(repo)
        _require_same_architecture(request.model, architecture, where=repo)
        _require_head(repo, cfg.get("num_classes", 1000), request)
        options = {"input_size": request.input_size, "model_args": arguments, "pretrained": True}
        classifier = build_timm(f"hf-hub:{repo}", **options)
    return rewrap(classifier, class_names=trained_class_names(classifier), source=f"Hugging Face Hub {repo}")


@contextmanager
def _fetching(repo: str) -> Iterator[None]:
    """Inside, files of `repo` come from the Hub, or from the local cache alone if the Hub does not answer at once: its
    own retries take half a minute per file without a network.

    Whatever fails inside becomes an InputError that says what could not be fetched and what to do. A few old networks
    of timm are at a plain address (https://…), which is not asked beforehand.
    """
    from huggingface_hub import constants

    online = "://" in repo or hub_answers(repo)
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not online
    try:
        yield
    except PatchproofError:
        raise
    # The Hub's client, its transport and timm's loader each raise kinds of their own, and these change by version.
    except Exception as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        if not isinstance(error, OSError):
            raise InputError(
                f"could not load {repo} as a timm network ({cause}); give another one, or a weight file"
            ) from error
        if not online:
            cause = "the Hugging Face Hub does not answer and the local cache does not hold it"
        raise InputError(
            f"could not fetch {repo}: {cause}; connect to the network, or download the weights elsewhere and give the "
            "path of the file"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def hub_answers(repo: str) -> bool:
    """Whether the Hub answers for `repo` at all; InputError where the answer is that there is no such model."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    name, _, revision = repo.partition("@")
    try:
        url = hf_hub_url(name, "config.json", revision=revision or None)
        get_hf_file_metadata(url, timeout=HUB_ANSWERS_WITHIN_SECONDS)
    except HFValidationError as error:
        raise InputError(f"{repo!r} is not a hub id (organisation/name): {first_line(error)}") from error
    except (RepositoryNotFoundError, GatedRepoError) as error:
        raise InputError(
            f"the Hugging Face Hub has no model {repo} open to you; check the name, or run `hf auth login`"
        ) from error
    except EntryNotFoundError:
        return True
    except Exception:  # no name resolution, no route, a proxy's refusal, a timeout, the offline switch
        return False
    return True


def _from_folder(request: _Request) -> ImageClassifier:
    folder, where = settled(request.path), str(request.path)
    record = read_record(folder)
    _require_same_architecture(request.model, record["architecture"], where=where)
    _require_head(where, record["num_classes"], request)
    size = request.input_size or tuple(record["input_size"])
    arguments = {"channels": len(record["mean"]), "model_args": record["model_args"]}
    try:
        classifier = _fresh(replace(request, input_size=size), record["num_classes"], **arguments)
    except PatchproofError:
        raise
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # the arguments are anybody's
        raise InputError(f"{where} cannot be rebuilt ({first_line(error)}); take another checkpoint") from error
    load_state(classifier.module, read_weights(folder), where=str(folder / WEIGHTS))
    recorded = {name: record[name] for name in settings(classifier)}
    found = rewrap(classifier, **recorded | {"input_size": size, "source": f"checkpoint {where}"})
    found.history = record["extra"]
    return found


def _finish(classifier: ImageClassifier, request: _Request) -> ImageClassifier:
    require_finite(classifier.module, where=classifier.source)
    _require_head(classifier.source, classifier.num_classes, request)
    names, own = request.class_names, classifier.class_names
    if names is not None:
        if own is not None and names != own and set(names) == set(own):
            raise InputError(
                f"{classifier.source} has the same class names in another order (first {own[0]}, not {names[0]}): "
                "leave class_names out and use match_labels"
            )
        classifier = rewrap(classifier, class_names=names)
    if request.drop_tokens:
        classifier = rewrap(classifier, drop_tokens=True)
    return classifier.to("cpu", torch.float32).eval()


def _require_head(where: str, found: int, request: _Request) -> None:
    """Before anything is fetched or read: the head has the classes that are asked for, or any at all."""
    if found < 1:
        raise InputError(f"{where} has no classification head (it gives features); choose weights that have one")
    if request.num_classes not in (None, found):
        raise other_classes(where, found, request.num_classes)


def _require_same_architecture(asked: str, found: str, *, where: str) -> None:
    def canonical(model: str) -> str:
        """One name for an architecture: without tag, without the folder that a factory's file is in."""
        if is_own(model):
            return Path(model).name
        return model if model in NETWORKS else split_name(model)[0]

    if asked != found and canonical(asked) != canonical(found):
        raise InputError(f"{where} holds weights for {found}, but the model is {asked}; name the model {found}")
