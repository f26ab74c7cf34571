"""The classifier F: a network with its normalisation inside, its identity, and what its outputs stand for."""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from patchproof.models._tokens import masked_tokens, token_pass, token_size
from patchproof.models._twin import Twin, structure_of
from patchproof.types import Classifier, InputError, Interpolation, Size, require_kinds, require_one_of, require_seed


class Wrapped:
    """A network and how images are prepared for it. `masked` and `local_logits` are missing if the network has none."""

    module: nn.Module
    fill: Any
    drop_tokens: bool

    @abstractmethod
    def prepared(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """The input of `module`."""

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits of images in [0, 1]."""
        return self.module(self.prepared(images))

    @property
    def masked(self) -> Callable[[Tensor, Tensor], Tensor]:
        """(images, keep Bool "b 1 h w", True = visible) -> logits, if the network has its own way to hide pixels."""
        if self.drop_tokens:
            return lambda images, keep: masked_tokens(self.module, self.prepared(images), keep)
        hide: Any = self.module.masked  # AttributeError if there is none
        return lambda images, keep: hide(self.prepared(images), keep)

    @property
    def local_logits(self) -> Callable[[Tensor], Tensor]:
        """Images -> logits of every cell (b classes rows columns)."""
        local: Any = self.module.local_logits
        return lambda images: local(self.prepared(images))


class Core(Wrapped):
    """A classifier as `module` computes it from images prepared otherwise: in another float type, or once for all
    masked copies. Then `fill` is prepared too."""

    def __init__(self, outer: Wrapped, module: nn.Module, prepare: Callable[[Tensor], Tensor], fill: Any) -> None:
        self.module, self.prepare, self.fill, self.drop_tokens = module, prepare, fill, outer.drop_tokens

    def prepared(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return self.prepare(images)

    __call__ = Wrapped.forward


class ImageClassifier(Wrapped, nn.Module):
    """F(x) = module((x - mean) / std): images in [0, 1] -> logits.

    - `fill`: the mask colour; by default the mean, which is zero after normalising.
    - `shift`, `scale`: mean and std as plain floats.
    - `architecture`, `model_args`: what was built, and further arguments it was built with.
    - `source`: where the weights came from, in words; `history`: what a checkpoint records of its training.
    - `drop_tokens`: a vision transformer is given only the tokens that a mask leaves visible. `token_size` is then
      their size in pixels, and masks are aligned to it.
    """

    mean: Tensor
    std: Tensor
    token_size: Size | None

    def __init__(
        self,
        module: nn.Module,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        input_size: Size,
        num_classes: int,
        class_names: Sequence[str] | None = None,
        interpolation: Interpolation = "bicubic",
        crop_pct: float = 1.0,
        architecture: str | None = None,
        source: str = "own module",
        model_args: Mapping[str, Any] | None = None,
        fill: Sequence[float] | None = None,
        drop_tokens: bool = False,
    ) -> None:
        super().__init__()
        given = {"input_size": input_size, "num_classes": num_classes, "class_names": class_names}
        require_kinds(ImageClassifier.__init__, given)
        shift, scale = tuple(map(float, mean)), tuple(map(float, std))
        size: Any = tuple(map(int, input_size))
        names = None if class_names is None else tuple(class_names)
        if not shift or len(shift) != len(scale):
            raise InputError(f"mean and std need one value per channel each, got {len(shift)} and {len(scale)} values")
        if not all(0 <= value <= 1 for value in shift):
            raise InputError(f"mean must be within [0, 1] as the images are, got {shift}; divide 0-255 values by 255")
        if not all(0 < value < math.inf for value in scale):
            raise InputError(f"std must be positive and finite, got {scale}")
        if min(size) < 1:
            raise InputError(f"input_size must be (height, width) in pixels, both at least 1, got {size}")
        require_one_of("interpolation", interpolation, get_args(Interpolation))
        _require_crop(crop_pct)
        if num_classes < 1:
            raise InputError(f"num_classes must be at least 1, got {num_classes}; a classifier needs a head")
        if names is not None and len(names) != num_classes:
            raise InputError(f"{num_classes} classes need as many class names, got {len(names)}")
        if names is not None and len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"class names must differ from each other, {twice!r} comes more than once")
        self.module = module
        self.shift, self.scale = shift, scale
        # Not persistent: the state dict is the network's own; mean and std travel in classifier.json.
        self.register_buffer("mean", torch.tensor(shift), persistent=False)
        self.register_buffer("std", torch.tensor(scale), persistent=False)
        self.input_size: Size = size
        self.num_classes, self.class_names = int(num_classes), names
        self.interpolation: Interpolation = interpolation
        self.crop_pct = float(crop_pct)
        self.architecture, self.source = architecture or type(module).__name__, source
        self.model_args: dict[str, Any] = dict(model_args or {})
        self.history: Mapping[str, Any] = {}
        self.drop_tokens = drop_tokens
        self.token_size = token_size(module) if drop_tokens else None
        self._twins: dict[tuple[torch.dtype, bool], Twin] = {}
        self.fill = shift if fill is None else fill
        self.fill = mask_colour(self)
        if len(self.fill) != len(shift):
            raise InputError(f"fill needs one value in [0, 1] per channel ({len(shift)}), got {self.fill}")

    def prepared(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if images.shape[1] != len(self.shift):
            raise InputError(f"expected images of {len(self.shift)} channels (b c h w), got {tuple(images.shape)}")
        return (images - self.mean[:, None, None]).div_(self.std[:, None, None])

    @property
    def receptive_field(self) -> tuple[int, int, int]:
        """(size, stride, offset) in pixels: cell (r, q) sees rows offset + r·stride … + size − 1; columns likewise."""
        return self.module.receptive_field  # type: ignore[return-value]

    def lowered(self, dtype: torch.dtype, *, compiled: bool = False) -> Core | None:
        """F computed in `dtype`: images are normalised in float32, then a fast copy that follows the weights runs.

        None if the network cannot be converted; autocast may still run it.
        """
        twin = self._twins.get((dtype, compiled))
        if twin is None or twin.structure != structure_of(self.module):
            shape = len(self.shift), *self.input_size
            twin = self._twins[dtype, compiled] = Twin.of(self.module, dtype, input_shape=shape, compiled=compiled)
            if self.drop_tokens and compiled and twin.network is not None:
                passes: Any = torch.compile(partial(token_pass, twin.network), dynamic=True)
                twin.network.token_pass = passes  # dynamic: for any number of images and tokens
        network = twin.following(self.module)
        if network is None:
            return None
        return Core(self, network, lambda images: self.prepared(images).to(dtype), self.fill)

    def refresh(self) -> None:
        """Make the fast copies of `lowered` take over the weights at their next use, however they were changed."""
        for twin in self._twins.values():
            twin.seen = None

    def __getattr__(self, name: str) -> Any:
        """Called for names that are missing: say where the module has them."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = vars(self).get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            raise AttributeError(f"{error}; its module has: classifier.module.{name}") from None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the fast copies: a copy of a classifier makes its own."""
        return {**super().__getstate__(), "_twins": {}}  # type: ignore[no-untyped-call]


def only_prepares(classifier: Any) -> bool:
    """True if a `Core` can take its place: a classifier of these types without hooks or methods of its own."""
    if type(classifier) not in (ImageClassifier, Core):
        return False
    added = ("_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl", "forward", "prepared")
    return not any(vars(classifier).get(name) for name in added)


def adopt(module: nn.Module, *, input_size: Size, num_classes: int, channels: int = 3) -> ImageClassifier:
    """Return an ImageClassifier as it is; wrap any other module with mean 0 and std 1, which changes no pixel."""
    if isinstance(module, ImageClassifier):
        return module
    mean, std = (0.0,) * channels, (1.0,) * channels
    fill: Any = getattr(module, "fill", (0.5,) * channels)
    return ImageClassifier(module, mean=mean, std=std, fill=fill, input_size=input_size, num_classes=num_classes)


def settings(classifier: ImageClassifier) -> dict[str, Any]:
    """The keyword arguments of ImageClassifier that wrap a module as `classifier` wraps its own."""
    names = ("input_size", "num_classes", "class_names", "interpolation", "crop_pct", "architecture", "source")
    kept = {name: getattr(classifier, name) for name in (*names, "model_args", "fill", "drop_tokens")}
    return {"mean": classifier.shift, "std": classifier.scale, **kept}


def rewrap(classifier: ImageClassifier, *, module: nn.Module | None = None, **changes: Any) -> ImageClassifier:
    """A classifier with some settings (or the module) changed, in the same mode and on the same device."""
    new = ImageClassifier(classifier.module if module is None else module, **settings(classifier) | changes)
    new.mean, new.std = new.mean.to(classifier.mean), new.std.to(classifier.std)
    new.training, new.history = classifier.training, classifier.history
    return new


@contextmanager
def seeded(seed: int, gpu: torch.device | None = None) -> Iterator[None]:
    """Start torch's CPU generator, and that of the GPU in use, at `seed`, and restore them afterwards.

    No other generator is touched.
    """
    require_seed(seed)
    with torch.random.fork_rng(devices=[] if gpu is None else [gpu]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a traceback for each absent device
        if gpu is not None:
            torch.cuda.manual_seed(seed)
        yield


def mask_colour(classifier: Classifier) -> tuple[float, ...] | None:
    """The classifier's `fill` as plain numbers; None if it has none, which means mid-grey."""
    fill = getattr(classifier, "fill", None)
    if fill is None:
        return None
    try:
        values = tuple(map(float, fill))
    except (TypeError, ValueError):
        values = ()
    if not values or not all(0 <= value <= 1 for value in values):
        raise InputError(
            f"the classifier's fill must be one number in [0, 1] per channel, e.g. (0.5, 0.5, 0.5), not {fill!r:.60}"
        )
    return values


def require_attributes(classifier: Classifier) -> None:
    """Refuse attributes of any classifier that an ImageClassifier cannot have."""
    names = ("input_size", "num_classes", "class_names", "interpolation", "crop_pct")
    given = {name: getattr(classifier, name, None) for name in names}
    known = {name: value for name, value in given.items() if value is not None}
    require_kinds(ImageClassifier.__init__, known, "classifier.")
    require_kinds(ImageClassifier, {"token_size": getattr(classifier, "token_size", None)}, "classifier.")
    _require_crop(known.get("crop_pct", 1.0), "classifier.")
    mask_colour(classifier)


def _require_crop(crop_pct: float, owner: str = "") -> None:
    if not 0 < crop_pct < math.inf:
        raise InputError(
            f"{owner}crop_pct must be positive (the part of the resized side that is kept), not {crop_pct}"
        )


def weights_sha256(classifier: Classifier) -> str | None:
    """The identity of a classifier: a SHA-256 over its weights, mean and std, and whether it drops tokens.

    For an ensemble, it covers the members' digests and mask colours other than the default: the mean, or mid-grey for a
    plain module. None if the weights are unknown, because a classifier is no nn.Module.
    """
    if isinstance(classifier, ImageClassifier):
        state = classifier.module.state_dict()
        return state_sha256(state, classifier.mean, classifier.std, drop_tokens=classifier.drop_tokens)
    members = getattr(classifier, "members", None)
    if members is None:
        return state_sha256(classifier.state_dict()) if isinstance(classifier, nn.Module) else None
    parts: list[Any] = [weights_sha256(member) for member in members]
    if None in parts:
        return None
    if getattr(classifier, "mirrored", False):
        parts.append("mirrored")
    for position, member in enumerate(members):
        colour = mask_colour(member)
        default = member.shift if isinstance(member, ImageClassifier) else (0.5,) * len(colour or ())
        if colour is not None and colour != default and not hasattr(member, "members"):  # whose digest has its colours
            parts.append([position, colour])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def state_sha256(
    state: Mapping[str, Tensor], mean: Tensor | None = None, std: Tensor | None = None, *, drop_tokens: bool = False
) -> str:
    """SHA-256 over name, dtype, shape and bytes of every tensor in the order of the names; the settings count too."""
    settings = {"(mean)": mean, "(std)": std, "(drop tokens)": torch.tensor(True) if drop_tokens else None}
    digest = hashlib.sha256()
    for name, tensor in sorted([*state.items(), *settings.items()]):
        if tensor is not None:
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def classifier_summary(classifier: Classifier) -> dict[str, Any]:
    """The description of a classifier in a manifest, and of each member of an ensemble; None for what is unknown."""

    def listed(name: str) -> list[Any] | None:
        value = getattr(classifier, name, None)
        return None if value is None else list(value)

    fill = mask_colour(classifier)
    parameters = classifier.parameters() if isinstance(classifier, nn.Module) else ()
    summary = {
        "architecture": getattr(classifier, "architecture", type(classifier).__name__),
        "source": getattr(classifier, "source", None),
        "classes": getattr(classifier, "num_classes", None),
        "class_names": listed("class_names"),
        "mean": listed("shift"),
        "std": listed("scale"),
        "fill": None if fill is None else list(fill),
        "input_size": listed("input_size"),
        "parameters": sum(parameter.numel() for parameter in parameters),
    }
    if getattr(classifier, "drop_tokens", False):
        summary["drop_tokens"] = True
    members = getattr(classifier, "members", ())
    if members:
        summary["members"] = [classifier_summary(one) | {"weights_sha256": weights_sha256(one)} for one in members]
    return summary


def match_labels(
    dataset_class_names: Sequence[str], classifier: Classifier, dataset: str = "the data set"
) -> list[int]:
    """The index of the classifier's output for each class of the data set, which messages call `dataset`.

    Classes are matched by name, or by position if the data set or the classifier has no class names.
    """
    from patchproof.models._build import wordnet_words  # which builds on this module

    names, known = dataset_class_names, getattr(classifier, "class_names", None)
    count = getattr(classifier, "num_classes", None)
    if not names:
        return list(range(count or 0))
    if known is None:
        if count in (None, len(names)):
            return list(range(len(names)))
        raise InputError(
            f"wrong number of classes: {dataset} has {len(names)}, the classifier {count} and no class names to "
            "match by; fine-tune it on this data set (`patchproof train`), or give its class names"
        )
    index = {name: position for position, name in enumerate(known)}
    unknown = [name for name in names if name not in index]
    if not unknown:
        return [index[name] for name in names]
    unused = [name for name in known if name not in set(names)]
    words = {(wordnet_words(name) or "").lower(): name for name in reversed(unused)}
    meant = [f"`{name}` is its {words[name.lower()]}" for name in unknown if name.lower() in words]
    raise InputError(
        f"{len(unknown)} of the {len(names)} classes of {dataset} {'is' if len(unknown) == 1 else 'are'} not among "
        f"the classifier's {len(known)}, e.g. {', '.join(unknown[:3])}; the classifier has "
        f"{', '.join(unused[:3]) or 'no others'}; fine-tune it on this data set (`patchproof train`), "
        "or name the class folders as the classifier does" + (f" ({', '.join(meant[:3])})" if meant else "")
    )
