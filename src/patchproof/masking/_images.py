"""Images on the device, what a mask does to them, and one forward pass of a classifier over masked images."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from patchproof.geometry import MaskSet, PatchThreat, covering_masks
from patchproof.masking._memory import out_of_memory
from patchproof.models import Core, mask_colour, require_attributes
from patchproof.types import CheckError, Classifier, InputError, PatchproofError, Size, failure, kind_of

Item = TypeVar("Item")

COPYING = Lock()
"""Held while `images_ahead` copies a batch to the GPU: its thread must not allocate while a CUDA graph is recorded."""


def require_batch(images: Any, image_size: Size) -> None:
    """Refuse anything but a batch of float32 images of this size, without reading a value from the device."""
    if not isinstance(images, Tensor) or images.dtype != torch.float32:
        raise InputError(
            f"images must be a float32 tensor with values in [0, 1], not {kind_of(images)}; e.g. "
            "torch.as_tensor(images).float(), bytes divided by 255"
        )
    if images.layout != torch.strided or images.is_meta:
        raise InputError(
            f"images must be a dense tensor with values, not {images.layout} on the device {images.device}; "
            "e.g. images.to_dense()"
        )
    if images.ndim != 4 or tuple(images.shape[-2:]) != image_size:
        raise InputError(
            f"images must have the shape (images, channels, height, width) with height and width {image_size}, not "
            f"{tuple(images.shape)}; resize or permute them, or build threat and masks for their size"
        )


def require_images(images: Any, image_size: Size) -> None:
    """Refuse anything but a batch of float32 images in [0, 1] of this size."""
    require_batch(images, image_size)
    smallest, largest = torch.stack(images.aminmax()).tolist() if images.numel() else (0, 0)
    if not 0 <= smallest <= largest <= 1:  # NaN fails too
        raise InputError(
            f"images must have values in [0, 1], not from {smallest:.9g} to {largest:.9g}; divide bytes by 255, and "
            "leave normalisation to the classifier"
        )


def as_images(pixels: Tensor, device: torch.device | str) -> Float[Tensor, "b c h w"]:
    """Return floats in [0, 1] on the device, channels last for faster convolutions; bytes are converted there."""
    there = pixels.to(device, non_blocking=True).to(torch.float32, memory_format=torch.channels_last)
    return there if pixels.is_floating_point() else there.div_(255)


def images_ahead(
    batches: Iterable[tuple[Item, Tensor]], device: torch.device
) -> Iterator[tuple[Item, Float[Tensor, "b c h w"]]]:
    """Yield each batch with its images on the device, while the next batch (and no more) is read and copied."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    remaining = iter(batches)

    def fetch() -> tuple[Item, Tensor, torch.cuda.Event | None] | None:
        for item, pixels in remaining:
            if stream is None:
                return item, as_images(pixels, device), None
            with COPYING, torch.cuda.stream(stream):
                return item, as_images(pixels.pin_memory(), device), stream.record_event()
        return None

    with ThreadPoolExecutor(1, thread_name_prefix="patchproof-ahead") as pool:
        coming = pool.submit(fetch)
        while (found := coming.result()) is not None:
            coming = pool.submit(fetch)
            item, images, copied = found
            if copied is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(copied)
                images.record_stream(current)
            yield item, images


def fill_colour(classifier: Classifier, images: Tensor) -> Float[Tensor, "c 1 1"]:
    """Return the colour of a masked pixel: the classifier's `fill`, or mid-grey if it has none."""
    if isinstance(classifier, Core) and isinstance(classifier.fill, Tensor):
        return classifier.fill
    channels = images.shape[1]
    values = mask_colour(classifier) or (0.5,) * channels
    if len(values) != channels:
        raise InputError(f"the classifier's fill has {len(values)} channels, the images have {channels}")
    return _constant(values, images.dtype, images.device)


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Float[Tensor, "c 1 1"]:
    with torch.inference_mode(False):  # it is cached, so it must be usable with gradients too
        return torch.tensor(values, dtype=dtype, device=device)[:, None, None]


def occlude(
    images: Float[Tensor, "*b c h w"], keep: Bool[Tensor, "*#b 1 h w"], fill: Float[Tensor, "c 1 1"] | Sequence[float]
) -> Float[Tensor, "*b c h w"]:
    """Return x ⊙ m. Hidden pixels are replaced, not multiplied by 0, so that even NaN in them has no effect.

    `fill` is one number for each channel, e.g. the classifier's `fill`.
    """
    if not isinstance(fill, Tensor):
        if len(fill) != images.shape[-3]:
            raise InputError(f"fill must be one number for each of the {images.shape[-3]} channels, not {fill!r:.60}")
        fill = images.new_tensor(fill)[:, None, None]
    return torch.where(keep, images, fill)


@contextmanager
def explained(images: Tensor) -> Iterator[None]:
    """Turn an error raised by the classifier within this context into one that names the images' shape."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PatchproofError) or out_of_memory(error):
            raise
        hint = "; is it built for that shape?" if isinstance(error, (RuntimeError, AssertionError)) else ""
        if re.search(r"dtype|scalar type|Input type", str(error)):
            hint = "; images are float32: call model.float()"
        raise CheckError(
            f"the classifier fails on images of {tuple(images.shape[1:])} (channels, height, width): "
            f"{failure(error)}{hint}"
        ) from error


def show(
    classifier: Classifier, images: Float[Tensor, "b c h w"], keep: Bool[Tensor, "b 1 h w"] | None
) -> Float[Tensor, "b classes"]:
    """Return F(x ⊙ m), or F(x) without a mask.

    A classifier with a method `masked(images, keep)` defines for itself what a hidden pixel means. Its images have the
    hidden pixels filled all the same: a certificate must not depend on the method ignoring them.
    """
    masked = images if keep is None else occlude(images, keep, fill_colour(classifier, images))
    with explained(images):
        own = None if keep is None else getattr(classifier, "masked", None)
        logits: Any = classifier(masked) if own is None else own(masked, keep)
    if not isinstance(logits, Tensor):
        raise CheckError(
            f"the classifier returns a {type(logits).__name__}, not a tensor of logits (images, classes); wrap it in a "
            "module whose forward returns the logits alone, e.g. model(images)[0] or model(images).logits"
        )
    if logits.ndim != 2 or len(logits) != len(images):
        raise CheckError(
            f"the classifier maps {len(images)} images to {tuple(logits.shape)}; it must return logits of shape "
            f"({len(images)}, classes)"
        )
    return logits


def masks_for(classifier: Classifier, threat: PatchThreat, *, per_axis: int | tuple[int, int]) -> MaskSet:
    """Return covering masks of the threat; for a classifier that drops tokens (`token_size`) they hide whole tokens."""
    require_attributes(classifier)
    return covering_masks(threat, per_axis=per_axis, align=getattr(classifier, "token_size", None))


class MaskedForward(nn.Module):
    """A module whose forward pass is `show`, for tools that wrap modules: DistributedDataParallel, mixed precision."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Float[Tensor, "b c h w"], keep: Bool[Tensor, "b 1 h w"]) -> Float[Tensor, "b classes"]:
        return show(self.classifier, images, keep)
