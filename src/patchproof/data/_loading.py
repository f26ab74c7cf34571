"""Images as 8-bit network inputs, decoded ahead of use, and batches of them that no number of threads changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import floor
from numbers import Integral

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from PIL import Image
from torch import Tensor

from patchproof.data._decode import MAX_PIXELS, BadImageError
from patchproof.data._sources import ImageSource
from patchproof.geometry import nearest_sources, placement, resize_weights
from patchproof.types import InputError, Interpolation, Preprocessing, Size

Decoded = dict[int, np.ndarray]
"""Network inputs (h w c) by their index in the source, kept so that each image is decoded once."""

_PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def preprocess(
    image: Image.Image | Float32[Tensor, "c h w"], preprocessing: Preprocessing
) -> UInt8[Tensor, "3 h2 w2"] | Float32[Tensor, "c h w"]:
    """Resize, then crop, as `geometry.placement` says; a float tensor must have the input size already.

    Pillow resizes if `antialias` is set. Otherwise, and for "nearest", the tables of `geometry` do: torch's kernels
    with exact zeros, so that no pixel outside a native patch's footprint can change. The two bicubic kernels differ
    (Pillow a = −0.5, torch −0.75), as in the pipelines built on either. Channels stay last in memory, and nothing here
    starts torch's threads, because many calls run at once.
    """
    if isinstance(image, Tensor):
        found, wanted = tuple(image.shape[1:]), output_size(preprocessing)
        if wanted not in (None, found):
            raise InputError(
                f"float tensors must have the input size {wanted}, not {found}; resize them, or give PIL images"
            )
        return image
    native = image.height, image.width
    if 0 in native:
        raise InputError("it has no pixels")
    place = placement(preprocessing, native)
    size = place.resized
    # A sliver such as 1×60000 stays within any file limit but has billions of pixels once its short side is 256.
    if size[0] * size[1] > MAX_PIXELS:
        raise InputError(f"resizing makes it {size[0]}×{size[1]}, more than {MAX_PIXELS:,} pixels; crop it first")
    if native == size:
        pixels = np.asarray(image)
    elif preprocessing.interpolation == "nearest":
        rows, columns = nearest_sources(native[0], size[0]), nearest_sources(native[1], size[1])
        pixels = np.asarray(image)[rows[:, None], columns]
    elif preprocessing.antialias:
        pixels = np.asarray(image.resize((size[1], size[0]), _PILLOW_FILTERS[preprocessing.interpolation]))
    else:
        above = resize_weights(native[0], size[0], preprocessing.interpolation)
        across = resize_weights(native[1], size[1], preprocessing.interpolation)
        exact = above @ np.asarray(image).transpose(2, 0, 1).astype(np.float64) @ across.T
        pixels = np.rint(exact).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    cropped = pixels[place.top : place.top + place.size[0], place.left : place.left + place.size[1]]
    return torch.from_numpy(cropped.copy()).permute(2, 0, 1)


def output_size(preprocessing: Preprocessing) -> Size | None:
    """The input size, or None if it depends on the image."""
    if preprocessing.crop is not None:
        return preprocessing.crop
    return preprocessing.resize if isinstance(preprocessing.resize, tuple) and not preprocessing.cover else None


def default_preprocessing(
    low_resolution: bool, input_size: Size, *, interpolation: Interpolation = "bicubic", crop_pct: float = 0.875
) -> Preprocessing:
    """Resize low-resolution images to `input_size`; others to ⌊side / crop_pct⌋, then crop (paper, Section 4.1).

    For an oblong input, images cover ⌊height / crop_pct⌋ × ⌊width / crop_pct⌋ and keep their own aspect.
    """
    if low_resolution:
        return Preprocessing(resize=input_size, crop=None, interpolation=interpolation)
    height, width = (floor(side / crop_pct) for side in input_size)
    if height == width:
        return Preprocessing(height, crop=input_size, interpolation=interpolation)
    return Preprocessing((height, width), crop=input_size, interpolation=interpolation, cover=True)


@dataclass(frozen=True)
class BadImage:
    """The image `index` of the source, at `path`, was left out because of `reason`."""

    index: int
    path: str
    reason: str


@dataclass(frozen=True, eq=False)
class Batch:
    """Images of a source: `images[i]`, with the label `labels[i]`, is number `indices[i]`; `bad` ones are left out.

    The images are bytes, or floats in [0, 1] if the source's images are float tensors.
    """

    indices: list[int]
    images: UInt8[Tensor, "b 3 h w"] | Float32[Tensor, "b c h w"]
    labels: Int64[Tensor, " b"]
    bad: list[BadImage]


def spread_indices(source: ImageSource, limit: int | None) -> list[int]:
    """`limit` indices of images, evenly spaced; all of them if there are no more, or if `limit` is None.

    A class of a sorted listing is seen if it has at least n/limit of the n images.
    """
    if limit is not None and not (isinstance(limit, Integral) and limit >= 1):
        raise InputError(
            f"limit, the number of images, must be a whole number of at least 1, not {limit!r}; leave it out to use all"
        )
    return list(evenly_spread(len(source) if limit is None else int(limit), len(source)))


def evenly_spread(wanted: int, count: int) -> Sequence[int]:
    """⌊i·count/wanted⌋ for i < wanted: evenly spaced numbers below `count`, or all of them if there are no more."""
    return range(count) if wanted >= count else [i * count // wanted for i in range(wanted)]


def iterate_batches(
    source: ImageSource,
    preprocessing: Preprocessing,
    indices: Sequence[int],
    *,
    batch_size: int,
    workers: int = 2,
    skip_bad: bool = False,
    kept: Decoded | None = None,
) -> Iterator[Batch]:
    """Batch i holds indices[i·batch_size : (i+1)·batch_size], in that order, without the bad images.

    `workers` threads decode a few batches ahead and end with the iterator. Without `skip_bad`, a bad image raises its
    BadImageError when its batch is reached, after the batches before it.
    """
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, not {batch_size}")
    require_workers(workers)
    groups = (indices[start : start + batch_size] for start in range(0, len(indices), batch_size))
    return load_groups(source, preprocessing, groups, workers=workers, skip_bad=skip_bad, kept=kept)


def load_groups(
    source: ImageSource,
    preprocessing: Preprocessing,
    groups: Iterable[Sequence[int]],
    *,
    workers: int = 2,
    skip_bad: bool = False,
    ahead: int = 2,
    kept: Decoded | None = None,
) -> Iterator[Batch]:
    """Yield a batch for each group of indices; a group is taken when it is about to be decoded, `ahead` batches early.

    Images in `kept` are not decoded again, and newly decoded ones are added to it.
    """
    known = {} if kept is None else kept

    def load(index: int) -> np.ndarray:
        image = source.load(index)
        try:
            return preprocess(image, preprocessing).permute(1, 2, 0).numpy()
        except InputError as error:
            if isinstance(image, Tensor):
                raise
            # e.g. smaller than the crop: the other images of the set may be fine
            raise BadImageError(source.path(index), str(error)) from error

    def collect(group: Sequence[int], pending: dict[int, Future[np.ndarray]]) -> Batch:
        found: Decoded = {}
        bad: dict[int, BadImage] = {}
        for index in group:
            try:
                found[index] = pending[index].result() if index in pending else known[index]
            except BadImageError as error:
                if not skip_bad:
                    raise
                bad[index] = BadImage(index, source.path(index), error.reason)
        if kept is not None:
            kept.update(found)
        good = [index for index in group if index in found]
        labels = torch.tensor([source.labels[index] for index in good], dtype=torch.int64)
        return Batch(good, _stack([found[index] for index in good], preprocessing), labels, list(bad.values()))

    pool = ThreadPoolExecutor(workers, thread_name_prefix="patchproof-decode")
    queue: deque[tuple[Sequence[int], dict[int, Future[np.ndarray]]]] = deque()
    try:
        for group in groups:
            queue.append((group, {index: pool.submit(load, index) for index in group if index not in known}))
            if len(queue) > ahead:
                yield collect(*queue.popleft())
        while queue:
            yield collect(*queue.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def require_workers(workers: int | None) -> None:
    """Refuse a number of threads that cannot decode; None stands for the default."""
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, not {workers}")


def _stack(images: list[np.ndarray], preprocessing: Preprocessing) -> Tensor:
    if not images:
        return torch.empty(0, 3, *(output_size(preprocessing) or (0, 0)), dtype=torch.uint8)
    if len({image.dtype for image in images}) > 1:
        raise InputError(
            "PIL images (bytes) and tensors (floats) cannot share a batch; give all PIL images or all tensors"
        )
    sizes = sorted({(image.shape[2], *image.shape[:2]) for image in images})
    if len(sizes) > 1:
        raise InputError(
            f"images of different sizes cannot share a batch: {sizes[0]} and {sizes[-1]} after {preprocessing}; "
            "give the preprocessing a crop or an exact size, or use batches of 1"
        )
    # numpy copies at once, where torch would start threads.
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
