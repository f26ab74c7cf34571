"""Batches of a source, decoded ahead of use; the same batches whatever the number of threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from patchproof.data._decode import BadImageError
from patchproof.data._preprocess import preprocess
from patchproof.data._sources import ImageSource
from patchproof.types import InputError, Preprocessing, Size

BATCHES_AHEAD = 2
_Pending = list[tuple[int, "Future[Tensor]"]]


@dataclass(frozen=True)
class BadImage:
    """The image `index` of the source, at `path`, was left out because of `reason`."""

    index: int
    path: str
    reason: str


@dataclass(frozen=True, eq=False)
class Batch:
    """`images[i]` is the image `indices[i]` of the source; `bad` ones are in none of the three."""

    indices: list[int]
    images: UInt8[Tensor, "b 3 h w"]
    labels: Int64[Tensor, " b"]
    bad: list[BadImage]


def spread_indices(source: ImageSource, limit: int | None) -> list[int]:
    """`limit` of the images, evenly spaced; all of them when there are no more or limit is None.

    A class of a sorted listing is seen whenever it has at least n/limit of n images.
    """
    if limit is not None and limit < 1:
        raise InputError(f"the limit on the number of images must be at least 1, not {limit}; leave it out to use all")
    return list(evenly_spread(len(source) if limit is None else limit, len(source)))


def evenly_spread(wanted: int, count: int) -> Sequence[int]:
    """⌊i·count/wanted⌋: `wanted` of the numbers below `count`, or all of them where there are no more."""
    return range(count) if wanted >= count else [i * count // wanted for i in range(wanted)]


def iterate_batches(
    source: ImageSource,
    preprocessing: Preprocessing,
    indices: Sequence[int],
    *,
    batch_size: int,
    workers: int = 2,
    skip_bad: bool = False,
    kept: dict[int, Tensor] | None = None,
) -> Iterator[Batch]:
    """Batch i holds indices[i·batch_size : (i+1)·batch_size], in that order, less the bad images.

    `workers` threads decode a few batches ahead and end with the iterator. Without `skip_bad`, a bad image raises its
    BadImageError when its batch is reached, after the batches before it.
    """
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, not {batch_size}")
    groups = (indices[start : start + batch_size] for start in range(0, len(indices), batch_size))
    return load_groups(source, preprocessing, groups, workers=workers, skip_bad=skip_bad, kept=kept)


def load_groups(
    source: ImageSource,
    preprocessing: Preprocessing,
    groups: Iterable[Sequence[int]],
    *,
    workers: int = 2,
    skip_bad: bool = False,
    ahead: int = BATCHES_AHEAD,
    kept: dict[int, Tensor] | None = None,
) -> Iterator[Batch]:
    """A batch for each group of indices. A group is asked for only when it is about to be decoded, `ahead` of its turn.

    `kept` holds what was decoded before, and gets what is decoded now.
    """
    if workers < 1:
        raise InputError(f"workers must be at least 1, not {workers}")
    return _batches(source, preprocessing, groups, workers=workers, skip_bad=skip_bad, ahead=ahead, kept=kept)


def _batches(
    source: ImageSource,
    preprocessing: Preprocessing,
    groups: Iterable[Sequence[int]],
    *,
    workers: int,
    skip_bad: bool,
    ahead: int,
    kept: dict[int, Tensor] | None,
) -> Iterator[Batch]:
    pool = ThreadPoolExecutor(workers, thread_name_prefix="patchproof-decode")
    queue: deque[_Pending] = deque()
    try:
        for group in groups:
            queue.append([(index, pool.submit(_load, source, preprocessing, index, kept)) for index in group])
            if len(queue) > ahead:
                yield _collect(source, preprocessing, queue.popleft(), skip_bad=skip_bad)
        while queue:
            yield _collect(source, preprocessing, queue.popleft(), skip_bad=skip_bad)
    finally:
        pool.shutdown(cancel_futures=True)


def _load(
    source: ImageSource, preprocessing: Preprocessing, index: int, kept: dict[int, Tensor] | None
) -> UInt8[Tensor, "3 h w"]:
    if kept is not None and index in kept:
        return kept[index]
    image = source.load(index)
    try:
        pixels = preprocess(image, preprocessing)
    except InputError as error:  # e.g. smaller than the crop: the other images of the set may be fine
        raise BadImageError(source.path(index), str(error)) from error
    if kept is not None:
        kept[index] = pixels
    return pixels


def _collect(source: ImageSource, preprocessing: Preprocessing, pending: _Pending, *, skip_bad: bool) -> Batch:
    indices: list[int] = []
    images: list[Tensor] = []
    bad: list[BadImage] = []
    for index, future in pending:
        try:
            images.append(future.result())
            indices.append(index)
        except BadImageError as error:
            if not skip_bad:
                raise
            bad.append(BadImage(index, source.path(index), error.reason))
    labels = torch.tensor([source.labels[index] for index in indices], dtype=torch.int64)
    return Batch(indices, _stack(images, preprocessing), labels, bad)


def _stack(images: list[Tensor], preprocessing: Preprocessing) -> UInt8[Tensor, "b 3 h w"]:
    sizes = sorted({(image.shape[1], image.shape[2]) for image in images})
    if len(sizes) > 1:
        raise InputError(
            f"images of different sizes cannot share a batch: {sizes[0]} and {sizes[-1]} after {preprocessing}; "
            "give the preprocessing a crop or an exact size, or use batches of 1"
        )
    if not images:
        return torch.empty(0, 3, *_fixed_size(preprocessing), dtype=torch.uint8)
    # Channels last, as each image lies in memory; numpy copies at once where torch would start threads.
    return torch.from_numpy(np.stack([image.permute(1, 2, 0).numpy() for image in images])).permute(0, 3, 1, 2)


def _fixed_size(preprocessing: Preprocessing) -> Size:
    """The input size where it does not depend on the image, else (0, 0)."""
    if preprocessing.crop is not None:
        return preprocessing.crop
    return preprocessing.resize if isinstance(preprocessing.resize, tuple) and not preprocessing.cover else (0, 0)
