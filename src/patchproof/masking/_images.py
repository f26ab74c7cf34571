"""Images on the device, and what a mask does to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from patchproof.types import Classifier, InputError

Item = TypeVar("Item")


def as_images(pixels: UInt8[Tensor, "b c h w"], device: torch.device | str) -> Float[Tensor, "b c h w"]:
    """Bytes to [0, 1] floats, on the device, so that a quarter of the data travels.

    Channels last: convolutions are faster so, on GPUs and CPUs alike.
    """
    there = pixels.to(device, non_blocking=True)
    return there.to(torch.float32, memory_format=torch.channels_last).div_(255)


def images_ahead(
    batches: Iterable[tuple[Item, UInt8[Tensor, "b c h w"]]], device: torch.device
) -> Iterator[tuple[Item, Float[Tensor, "b c h w"]]]:
    """Each batch with its images on the device; the next one travels while this one is computed."""
    if device.type != "cuda":
        for item, pixels in batches:
            yield item, as_images(pixels, device)
        return
    stream = torch.cuda.Stream(device)
    travelling: deque[tuple[Item, Tensor]] = deque()
    try:
        for item, pixels in batches:
            with torch.cuda.stream(stream):
                travelling.append((item, as_images(pixels.pin_memory(), device)))
            if len(travelling) > 1:
                item, images = travelling.popleft()
                yield item, _arrived(images, stream)
    except Exception:  # what came before the failure is still used
        for item, images in travelling:
            yield item, _arrived(images, stream)
        raise
    for item, images in travelling:
        yield item, _arrived(images, stream)


def _arrived(images: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Usable on the current stream, and not given back to `stream` before that one is done with it."""
    current = torch.cuda.current_stream(images.device)
    current.wait_stream(stream)
    images.record_stream(current)
    return images


def fill_colour(classifier: Classifier, images: Tensor) -> Float[Tensor, "c 1 1"]:
    """The colour of a masked pixel: the classifier's `fill`, else mid-grey."""
    channels = images.shape[1]
    fill = getattr(classifier, "fill", None)
    values = [0.5] * channels if fill is None else [float(v) for v in fill]
    if len(values) != channels:
        raise InputError(f"the classifier's fill has {len(values)} channels, the images have {channels}")
    return torch.tensor(values, dtype=images.dtype, device=images.device)[:, None, None]


def occlude(
    images: Float[Tensor, "*b c h w"], keep: Bool[Tensor, "*#b 1 h w"], fill: Float[Tensor, "c 1 1"]
) -> Float[Tensor, "*b c h w"]:
    """x ⊙ m. A choice, not a product: the hidden pixels are gone, NaN and all."""
    return torch.where(keep, images, fill)
