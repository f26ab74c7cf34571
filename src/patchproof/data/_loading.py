"""Batches of a source, decoded ahead of use; the same batches whatever the number of threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from patchproof.data._decode import BadImageError
from patchproof.data._preprocess import output_size, preprocess
from patchproof.data._sources import ImageSource
from patchproof.types import InputError, Preprocessing

BATCHES_AHEAD = 2


@dataclass(frozen=True)
class BadImage:
    """The image `index` of the source, at `path`, was left out because of `reason`."""

    index: int
    path: str
    reason: str


@dataclass(frozen=True, eq=False)
class Batch:
    """`images[i]` is the image `indices[i]` of the source; `bad` ones are in none of the three.

    Bytes, or floats in [0, 1] where the source's images are float tensors.
    """

    indices: list[int]
    images: UInt8[Tensor, "b 3 h w"] | Float32[Tensor, "b c h w"]
    labels: Int64[Tensor, " b"]
    bad: list[BadImage]


def spread_indices(source: ImageSource, limit: int | None) -> list[int]:
    """`limit` of the images, evenly spaced; all of them when there are no more or limit is None.

    A class of a sorted listing is seen whenever it has at least n/limit of n images.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit, the number of images, must be at least 1, not {limit}; leave it out to use all")
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

    def load(index: int) -> Tensor:
        if kept is not None and index in kept:
            return kept[index]
        image = source.load(index)
        try:
            pixels = preprocess(image, preprocessing)
        except InputError as error:
            if isinstance(image, Tensor):
                raise
            # e.g. smaller than the crop: the other images of the set may be fine
            raise BadImageError(source.path(index), str(error)) from error
        if kept is not None:
            kept[index] = pixels
        return pixels

    def collect(pending: list[tuple[int, Future[Tensor]]]) -> Batch:
        good: list[tuple[int, Tensor]] = []
        bad: list[BadImage] = []
        for index, future in pending:
            try:
                good.append((index, future.result()))
            except BadImageError as error:
                if not skip_bad:
                    raise
                bad.append(BadImage(index, source.path(index), error.reason))
        labels = torch.tensor([source.labels[index] for index, _ in good], dtype=torch.int64)
        return Batch([index for index, _ in good], _stack([image for _, image in good], preprocessing), labels, bad)

    def batches() -> Iterator[Batch]:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="patchproof-decode")
        queue: deque[list[tuple[int, Future[Tensor]]]] = deque()
        try:
            for group in groups:
                queue.append([(index, pool.submit(load, index)) for index in group])
                if len(queue) > ahead:
                    yield collect(queue.popleft())
            while queue:
                yield collect(queue.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    return batches()


def _stack(images: list[Tensor], preprocessing: Preprocessing) -> Tensor:
    if not images:
        return torch.empty(0, 3, *(output_size(preprocessing) or (0, 0)), dtype=torch.uint8)
    kinds = sorted({(tuple(image.shape), str(image.dtype)) for image in images})
    if len(kinds) > 1:
        (one, _), (other, _) = kinds[0], kinds[-1]
        raise InputError(
            f"images of different sizes or kinds cannot share a batch: {one} and {other} after {preprocessing}; "
            "give the preprocessing a crop or an exact size, or use batches of 1"
        )
    # Channels last, as each image is in memory; numpy copies at once where torch would start threads.
    return torch.from_numpy(np.stack([image.permute(1, 2, 0).numpy() for image in images])).permute(0, 3, 1, 2)
