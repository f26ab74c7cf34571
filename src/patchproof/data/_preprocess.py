"""An RGB image of any size as the network input, in 8 bits."""

from __future__ import annotations

from math import floor

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from patchproof.data._decode import MAX_PIXELS
from patchproof.data._sources import ImageSource
from patchproof.geometry import nearest_sources, placement, resize_weights
from patchproof.types import InputError, Interpolation, Preprocessing, Size

_PILLOW_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def preprocess(image: Image.Image, preprocessing: Preprocessing) -> UInt8[Tensor, "3 h w"]:
    """Resize, then crop, as `geometry.placement` says.

    Pillow resizes where `antialias` is set. Otherwise, and for "nearest", the tables of `geometry` do: torch's kernels,
    with weights whose zeros are exact, so that no pixel outside a native patch's footprint can move. The bicubic
    kernels differ (Pillow a = −0.5, torch −0.75), as they do in the pipelines built on either. In memory the channels
    stay last, as Pillow has them and networks like them, and nothing here starts torch's threads: many of these run at
    once.
    """
    place = placement(preprocessing, (image.height, image.width))
    rows = slice(place.top, place.top + place.size[0])
    columns = slice(place.left, place.left + place.size[1])
    pixels = _resize(image, place.resized, preprocessing)[rows, columns]
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def default_preprocessing(
    source: ImageSource | bool,
    input_size: Size,
    *,
    interpolation: Interpolation = "bicubic",
    crop_pct: float = 0.875,
) -> Preprocessing:
    """Low-resolution images whole to `input_size`, others to ⌊side / crop_pct⌋ and its centre (paper, Section 4.1).

    `source` is an image source, or whether the images are of low resolution. For an oblong input, images cover
    ⌊height / crop_pct⌋ × ⌊width / crop_pct⌋, whatever their own aspect.
    """
    if not 0 < crop_pct <= 1:
        raise InputError(f"crop_pct is the share of the shorter side that is kept, 0 < crop_pct <= 1, not {crop_pct:g}")
    low_resolution = source if isinstance(source, bool) else source.low_resolution
    if low_resolution:
        return Preprocessing(resize=input_size, crop=None, interpolation=interpolation)
    height, width = (floor(side / crop_pct) for side in input_size)
    if height == width:
        return Preprocessing(height, crop=input_size, interpolation=interpolation)
    return Preprocessing((height, width), crop=input_size, interpolation=interpolation, cover=True)


def _resize(image: Image.Image, size: Size, preprocessing: Preprocessing) -> UInt8[np.ndarray, "h w 3"]:
    _check_pixels(size)
    if (image.height, image.width) == size:
        return np.asarray(image)
    if preprocessing.interpolation == "nearest":
        rows, columns = (nearest_sources(*lengths) for lengths in zip((image.height, image.width), size, strict=True))
        return np.asarray(image)[rows[:, None], columns]
    if preprocessing.antialias:
        return np.asarray(image.resize((size[1], size[0]), _PILLOW_FILTERS[preprocessing.interpolation]))
    return _resize_by_weights(np.asarray(image), size, preprocessing.interpolation)


def _resize_by_weights(
    pixels: UInt8[np.ndarray, "h w 3"], size: Size, interpolation: Interpolation
) -> UInt8[np.ndarray, "h2 w2 3"]:
    rows, columns = (resize_weights(*lengths, interpolation) for lengths in zip(pixels.shape[:2], size, strict=True))
    resized = rows @ pixels.transpose(2, 0, 1).astype(np.float64) @ columns.T
    return np.rint(resized).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)


def _check_pixels(size: Size) -> None:
    """A sliver such as 1×60000 stays within any file limit but has billions of pixels once its short side is 256."""
    if size[0] * size[1] > MAX_PIXELS:
        raise InputError(f"resizing makes it {size[0]}×{size[1]}, more than {MAX_PIXELS:,} pixels; crop it first")
