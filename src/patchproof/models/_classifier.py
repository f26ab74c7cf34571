"""The classifier F: a network with its normalisation inside, and what is needed to feed and to name its outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from patchproof.models._twin import Twin
from patchproof.types import InputError, Interpolation, Size, require_one_of

SETTINGS = (
    "input_size",
    "num_classes",
    "class_names",
    "interpolation",
    "crop_pct",
    "architecture",
    "source",
    "model_args",
)


class ImageClassifier(nn.Module):
    """F(x) = module((x - mean) / std): images in [0, 1] -> logits.

    `fill` (= mean) is the mask colour, zero after normalising; `scale` is std as plain floats. `architecture` names
    what was built and `source` says in words where the weights came from; `model_args` are further arguments that
    the architecture was built with.
    """

    mean: Tensor
    std: Tensor

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
    ) -> None:
        super().__init__()
        _check_normalisation(mean, std)
        _check_input(input_size, interpolation, crop_pct)
        _check_classes(num_classes, class_names)
        self.module = module
        self.fill: tuple[float, ...] = tuple(float(value) for value in mean)
        self.scale: tuple[float, ...] = tuple(float(value) for value in std)
        # Not persistent: the state dict is the network's own; mean and std travel in classifier.json.
        self.register_buffer("mean", torch.tensor(self.fill), persistent=False)
        self.register_buffer("std", torch.tensor(self.scale), persistent=False)
        self.input_size: Size = (int(input_size[0]), int(input_size[1]))
        self.num_classes = int(num_classes)
        self.class_names: tuple[str, ...] | None = None if class_names is None else tuple(class_names)
        self.interpolation: Interpolation = interpolation
        self.crop_pct = float(crop_pct)
        self.architecture = architecture or type(module).__name__
        self.source = source
        self.model_args: dict[str, Any] = dict(model_args or {})
        self._twins: dict[tuple[torch.dtype, bool], Twin] = {}

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits of images in [0, 1]."""
        return self.module(self.normalised(images))

    def normalised(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if images.shape[1] != len(self.fill):
            raise InputError(f"expected images of {len(self.fill)} channels (b c h w), got {tuple(images.shape)}")
        return (images - self.mean[:, None, None]) / self.std[:, None, None]

    def lowered(self, dtype: torch.dtype, *, compiled: bool = False) -> Callable[[Tensor], Tensor] | None:
        """F computed in `dtype`, after normalising in float32, on a copy of the network that follows its weights.

        None where the network cannot be converted; autocast may still run it.
        """
        key = dtype, compiled
        if key not in self._twins or not self._twins[key].resembles(self.module):
            shape = len(self.fill), *self.input_size
            self._twins[key] = Twin.of(self.module, dtype, input_shape=shape, compiled=compiled)
        twin = self._twins[key].following(self.module)
        return None if twin is None else lambda images: twin(self.normalised(images).to(dtype))

    def refresh(self) -> None:
        """Have the copies that `lowered` keeps take over the weights at their next use, however they were changed."""
        for twin in self._twins.values():
            twin.seen = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the twins: a copy of a classifier makes its own."""
        return {**super().__getstate__(), "_twins": {}}  # type: ignore[no-untyped-call]


def settings(classifier: ImageClassifier) -> dict[str, Any]:
    """The keyword arguments that wrap a module just as `classifier` wraps its own."""
    return {"mean": classifier.fill, "std": classifier.scale} | {name: getattr(classifier, name) for name in SETTINGS}


def rewrap(classifier: ImageClassifier, *, module: nn.Module | None = None, **changes: Any) -> ImageClassifier:
    """The same classifier with some settings (or its module) changed, in the same mode and on the same device."""
    new = ImageClassifier(classifier.module if module is None else module, **settings(classifier) | changes)
    new.mean, new.std = new.mean.to(classifier.mean), new.std.to(classifier.std)
    new.training = classifier.training
    return new


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's CPU generator starts at `seed`; afterwards it is as it was. No other generator is touched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _check_normalisation(mean: Sequence[float], std: Sequence[float]) -> None:
    if len(mean) != len(std) or not mean:
        raise InputError(f"mean and std need one value a channel each, got {len(mean)} and {len(std)} values")
    if not all(0 <= value <= 1 for value in mean):
        raise InputError(f"mean must lie in [0, 1] as the images do, got {tuple(mean)}; divide 0-255 values by 255")
    if not all(value > 0 and math.isfinite(value) for value in std):
        raise InputError(f"std must be positive and finite, got {tuple(std)}")


def _check_input(input_size: Size, interpolation: str, crop_pct: float) -> None:
    if len(input_size) != 2 or min(input_size) < 1:
        raise InputError(f"input_size must be (height, width) in pixels, both at least 1, got {tuple(input_size)}")
    require_one_of("interpolation", interpolation, get_args(Interpolation))
    if not (crop_pct > 0 and math.isfinite(crop_pct)):
        raise InputError(f"crop_pct must be positive (the part of the resized side that is kept), got {crop_pct}")


def _check_classes(num_classes: int, class_names: Sequence[str] | None) -> None:
    if num_classes < 1:
        raise InputError(
            f"num_classes must be at least 1, got {num_classes}; a network without a head is no classifier"
        )
    if class_names is None:
        return
    if len(class_names) != num_classes:
        raise InputError(f"{num_classes} classes need as many class names, got {len(class_names)}")
    if len(set(class_names)) != len(class_names):
        twice = next(name for name in class_names if list(class_names).count(name) > 1)
        raise InputError(f"class names must differ from each other, {twice!r} comes more than once")
