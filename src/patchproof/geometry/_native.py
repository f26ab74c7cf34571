"""From the original image to the network input: where it lies, and which input pixels a native patch can change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from patchproof.geometry._threat import PatchThreat, Rect
from patchproof.types import InputError, Interpolation, Preprocessing, Size, typed


class Placement(NamedTuple):
    """Resize to `resized` (height, width), then cut `size` out at (`top`, `left`)."""

    resized: Size
    top: int
    left: int
    size: Size


def placement(preprocessing: Preprocessing, native_size: Size) -> Placement:
    """Where the network input lies in the resized image."""
    (height, width), resize = native_size, preprocessing.resize
    if resize is None:
        resized = native_size
    elif isinstance(resize, int):
        shorter = min(height, width)
        resized = height * resize // shorter, width * resize // shorter
    elif not preprocessing.cover:
        resized = resize
    elif resize[0] * width >= resize[1] * height:
        resized = resize[0], width * resize[0] // height
    else:
        resized = height * resize[1] // width, resize[1]
    crop = preprocessing.crop or resized
    if crop[0] > resized[0] or crop[1] > resized[1]:
        raise InputError(
            f"the crop {crop} is larger than the image {resized} it is cut from; resize to at least {max(crop)}"
        )
    # Halves to even, as torchvision's CenterCrop does.
    top, left = round((resized[0] - crop[0]) / 2), round((resized[1] - crop[1]) / 2)
    return Placement(resized, top, left, crop)


def native_footprint(patch: Rect, native_size: Size, preprocessing: Preprocessing) -> Rect | None:
    """The smallest rectangle of the network input that holds every pixel the native `patch` can change."""
    if not Rect(0, 0, *native_size).contains(patch):
        raise InputError(f"{patch} is not inside the image of {native_size[0]}×{native_size[1]}")
    rows, columns = _influences(native_size, preprocessing)
    reached_rows = np.flatnonzero(rows[:, patch.top : patch.bottom].any(axis=1)).tolist()
    reached_columns = np.flatnonzero(columns[:, patch.left : patch.right].any(axis=1)).tolist()
    if not reached_rows or not reached_columns:
        return None
    top, left = reached_rows[0], reached_columns[0]
    return Rect(top, left, reached_rows[-1] - top + 1, reached_columns[-1] - left + 1)


@typed
def native_threat(
    *, native_size: Size, patch_sizes: Sequence[Size], preprocessing: Preprocessing, patches: int = 1
) -> PatchThreat:
    """𝓡 at the network input for a patch on the original image: its largest footprint after resize and crop.

    A 5×5 patch on a 32×32 image touches up to 55×55 pixels of its bicubic 224×224 copy, not 35×35.
    """
    native = PatchThreat(native_size, tuple(patch_sizes), patches)
    rows, columns = _influences(native_size, preprocessing)
    sizes = tuple((_longest_reach(rows, h), _longest_reach(columns, w)) for h, w in native.patch_sizes)
    return PatchThreat(placement(preprocessing, native_size).size, sizes, patches)


def _influences(native_size: Size, preprocessing: Preprocessing) -> list[np.ndarray]:
    """For the rows and for the columns, [x, i]: native pixel i has a weight in input pixel x."""
    place = placement(preprocessing, native_size)
    axes = zip(native_size, place.resized, (place.top, place.left), place.size, strict=True)
    return [_influence(native, resized, preprocessing)[start : start + size] for native, resized, start, size in axes]


def _influence(native: int, resized: int, preprocessing: Preprocessing) -> np.ndarray:
    """[x, i]: native pixel i has a weight in resized pixel x."""
    interpolation = preprocessing.interpolation
    if native == resized:
        return np.eye(native, dtype=bool)
    if interpolation == "nearest":
        return nearest_sources(native, resized)[:, None] == np.arange(native)
    if not preprocessing.antialias:
        return resize_weights(native, resized, interpolation) != 0
    # Pillow's kernels. It rounds weights to 22 bits, so a weight that should be zero is zero.
    distance, unit = _distances(np.arange(native), native, resized), 2 * max(native, resized)
    if interpolation == "bilinear":
        return distance < unit
    return (distance < 2 * unit) & (distance != unit)


def _distances(i: np.ndarray, native: int, resized: int) -> np.ndarray:
    """[x, i]: distance between resized pixel x and native pixel i in units of 1/(2·resized) native pixels: integers.

    Resized pixel x is centred on native coordinate (x + ½)·native/resized − ½.
    """
    x = np.arange(resized, dtype=np.int64)[:, None]
    return np.abs((2 * i.astype(np.int64) + 1) * resized - (2 * x + 1) * native)


def nearest_sources(native: int, resized: int) -> np.ndarray:
    """The native pixel that each resized pixel copies, ⌊(x + ½)·native/resized⌋, in integers."""
    return ((2 * np.arange(resized, dtype=np.int64) + 1) * native) // (2 * resized)


def resize_weights(native: int, resized: int, interpolation: Interpolation) -> np.ndarray:
    """[x, i]: weight of native pixel i in resized pixel x without antialiasing; zero weights are exactly zero.

    The kernels are torch's: bilinear, or cubic with a = −¾, with border pixels repeated. Distances are integers until
    the kernel is evaluated, so rounding cannot hide a pixel that a native patch can change.
    """
    taps = np.arange(-2, native + 2)
    d = _distances(taps, native, resized) / (2 * resized)
    if interpolation == "bilinear":
        weights = np.where(d < 1, 1 - d, 0.0)
    else:
        near = (1.25 * d - 2.25) * d * d + 1
        far = ((-0.75 * d + 3.75) * d - 6) * d + 3
        weights = np.where(d < 1, near, np.where((d > 1) & (d < 2), far, 0.0))
    inner = weights[:, 2:-2].copy()
    inner[:, 0] += weights[:, :2].sum(axis=1)
    inner[:, -1] += weights[:, -2:].sum(axis=1)
    return inner


def _longest_reach(influence: np.ndarray, patch: int) -> int:
    """Largest extent, over all positions of the patch, of the input pixels that it influences; at least 1."""
    before = np.pad(influence.cumsum(axis=1), ((0, 0), (1, 0)))
    reached = before[:, patch:] > before[:, :-patch]  # [x, position]
    first = reached.argmax(axis=0)
    last = len(reached) - 1 - reached[::-1].argmax(axis=0)
    return int(np.where(reached.any(axis=0), last - first + 1, 1).max())
