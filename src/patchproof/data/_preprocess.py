"""An RGB image of any size as the network input, in 8 bits."""

from __future__ import annotations

from math import floor

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from PIL import Image
from torch import Tensor

from patchproof.data._decode import MAX_PIXELS
from patchproof.data._sources import ImageSource
from patchproof.geometry import nearest_sources, placement, resize_weights
from patchproof.types import InputError, Interpolation, Preprocessing, Size

_PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def preprocess(
    image: Image.Image | Float32[Tensor, "c h w"], preprocessing: Preprocessing
) -> UInt8[Tensor, "3 h2 w2"] | Float32[Tensor, "c h w"]:
    """Resize, then crop, as `geometry.placement` says; a float tensor is the network input already.

    Pillow resizes where `antialias` is set. Otherwise, and for "nearest", the tables of `geometry` do: torch's kernels,
    with weights whose zeros are exact, so that no pixel outside a native patch's footprint can move. The bicubic
    kernels differ (Pillow a = −0.5, torch −0.75), as they do in the pipelines built on either. In memory the channels
    stay last, as Pillow has them and networks like them, and nothing here starts torch's threads: many of these run at
    once.
    """
    if isinstance(image, Tensor):
        found, wanted = tuple(image.shape[1:]), output_size(preprocessing)
        if wanted not in (None, found):
            raise InputError(
                f"float tensors must have the input size {wanted}, not {found}; resize them, or give PIL images"
            )
        return image
    native = image.height, image.width
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
    """The input size where it does not depend on the image."""
    if preprocessing.crop is not None:
        return preprocessing.crop
    return preprocessing.resize if isinstance(preprocessing.resize, tuple) and not preprocessing.cover else None


def default_preprocessing(
    source: ImageSource | bool,
    input_size: Size,
    *,
    interpolation: Interpolation = "bicubic",
    crop_pct: float = 0.875,
) -> Preprocessing:
    """Low-resolution images uncropped to `input_size`, others to ⌊side / crop_pct⌋ and its centre (paper, Section 4.1).

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
