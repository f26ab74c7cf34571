"""Images on the device, and what a mask does to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from patchproof.geometry import MaskSet, PatchThreat, covering_masks
from patchproof.types import Classifier, InputError

Item = TypeVar("Item")


def as_images(pixels: Tensor, device: torch.device | str) -> Float[Tensor, "b c h w"]:
    """Bytes to [0, 1] floats on the device, so that a quarter of the data travels; floats stay as they are.

    Channels last: convolutions are faster so, on GPUs and CPUs alike.
    """
    there = pixels.to(device, non_blocking=True).to(torch.float32, memory_format=torch.channels_last)
    return there if pixels.is_floating_point() else there.div_(255)


def images_ahead(
    batches: Iterable[tuple[Item, Tensor]], device: torch.device
) -> Iterator[tuple[Item, Float[Tensor, "b c h w"]]]:
    """Each batch with its images on the device. One batch ahead, and no more, is read and copied while this one is
    computed; an error in reading it is raised in its turn."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    remaining = iter(batches)

    def fetch() -> tuple[Item, Tensor, torch.cuda.Event | None] | None:
        for item, pixels in remaining:
            if stream is None:
                return item, as_images(pixels, device), None
            with torch.cuda.stream(stream):
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
    """The colour of a masked pixel: the classifier's `fill`, else mid-grey."""
    channels = images.shape[1]
    fill = getattr(classifier, "fill", None)
    values = (0.5,) * channels if fill is None else tuple(map(float, fill))
    if len(values) != channels:
        raise InputError(f"the classifier's fill has {len(values)} channels, the images have {channels}")
    return _constant(values, images.dtype, images.device)


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Float[Tensor, "c 1 1"]:
    with torch.inference_mode(False):  # remembered, so it must be usable where gradients are wanted
        return torch.tensor(values, dtype=dtype, device=device)[:, None, None]


def occlude(
    images: Float[Tensor, "*b c h w"], keep: Bool[Tensor, "*#b 1 h w"], fill: Float[Tensor, "c 1 1"]
) -> Float[Tensor, "*b c h w"]:
    """x ⊙ m. A choice, not a product: the hidden pixels are gone, NaN and all."""
    return torch.where(keep, images, fill)


def show(
    classifier: Classifier, images: Float[Tensor, "b c h w"], keep: Bool[Tensor, "b 1 h w"] | None
) -> Float[Tensor, "b classes"]:
    """F(x ⊙ m), or F(x) without a mask.

    A classifier with a method `masked(images, keep)` says for itself what a hidden pixel means. It gets the images with
    the hidden pixels filled all the same: a certificate must not depend on its looking away.
    """
    if keep is None:
        return classifier(images)
    masked = occlude(images, keep, fill_colour(classifier, images))
    own = getattr(classifier, "masked", None)
    return classifier(masked) if own is None else own(masked, keep)


def masks_for(classifier: Classifier, threat: PatchThreat, *, per_axis: int | tuple[int, int]) -> MaskSet:
    """The covering masks of the threat; for a classifier that drops tokens (`token_size`) they hide whole ones."""
    return covering_masks(threat, per_axis=per_axis, align=getattr(classifier, "token_size", None))


class MaskedForward(nn.Module):
    """`show` as the forward pass of a module, for what wraps modules: DistributedDataParallel, mixed precision."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Float[Tensor, "b c h w"], keep: Bool[Tensor, "b 1 h w"]) -> Float[Tensor, "b classes"]:
        return show(self.classifier, images, keep)
