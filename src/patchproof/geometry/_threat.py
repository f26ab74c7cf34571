"""Patches: the rectangles that one may occupy, sizes as text, and the threat 𝓡."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, isqrt
from operator import index
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchproof.types import InputError, Size, note


class Rect(NamedTuple):
    """The pixels in rows [top, top + height) and columns [left, left + width)."""

    top: int
    left: int
    height: int
    width: int

    @property
    def bottom(self) -> int:
        return self.top + self.height

    @property
    def right(self) -> int:
        return self.left + self.width

    def contains(self, other: Rect) -> bool:
        rows = self.top <= other.top and other.bottom <= self.bottom
        return rows and self.left <= other.left and other.right <= self.right


Rects = Rect | tuple[Rect, ...]
"""One rectangle, or the union of several."""


def rects_of(shape: Rects) -> tuple[Rect, ...]:
    """The rectangles of a shape, as a tuple even if there is only one."""
    return (shape,) if isinstance(shape, Rect) else shape


def inside(places: Int64[Tensor, "p *k 4"], image_size: Size) -> Bool[Tensor, "p 1 h w"]:
    """True on the pixels of each location (top, left, height, width), or of the union of its k rectangles."""
    rects = places[:, None] if places.ndim == 2 else places
    top, left, height, width = rects[..., None, None].unbind(dim=2)
    row = torch.arange(image_size[0], device=places.device)[:, None]
    column = torch.arange(image_size[1], device=places.device)
    found = (row >= top) & (row < top + height) & (column >= left) & (column < left + width)
    return found.any(dim=1, keepdim=True)


def whole_size(size: Sequence[int], name: str = "a size") -> Size:
    """(height, width) as a tuple of plain integers, from any sequence of two integers of any type."""
    try:
        height, width = map(index, size)
    except (TypeError, ValueError) as error:
        example = (size, size) if isinstance(size, int) else (224, 224)
        raise InputError(f"{name} must be (height, width) in whole pixels, e.g. {example}, not {size!r:.60}") from error
    return height, width


def square_side(percent: float, image_size: Size) -> int:
    """The smallest s with s² ≥ percent/100 · H·W, in exact arithmetic: 1/2/3% = 23/32/39 at 224."""
    if isinstance(percent, str):
        raise InputError(f"percent must be a number, e.g. 3, not {percent!r}")
    if not 0 < percent <= 100:
        raise InputError(f"a patch covers more than 0 and at most 100 percent of the image, not {percent:g}")
    if min(image_size) < 1:
        raise InputError(f"image_size must be at least one pixel each way, not {size_words(image_size)}")
    area = Fraction(str(percent)) * image_size[0] * image_size[1] / 100
    side = isqrt(ceil(area) - 1) + 1
    if percent < 0.1:
        note(f"{percent:g} percent of the image is a patch of {side}×{side} pixels; for three percent give 3")
    return side


def parse_size(text: str) -> Size:
    """(height, width) from `224` or `224x320`."""
    match = re.fullmatch(r"([1-9]\d{0,3})(?:[x×]([1-9]\d{0,3}))?", text.strip())
    if not match:
        raise InputError(f"an image size looks like 224 or 224x320 (height x width), 1 to 9999 pixels, not `{text}`")
    return int(match[1]), int(match[2] or match[1])


def parse_patches(text: str, image_size: Size) -> tuple[Size, ...]:
    """Patch sizes in pixels from `3%`, `39px`, `20x60px`, or several of them with commas, for images of this size."""
    sizes = []
    for part in text.split(","):
        percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", part.strip())
        pixels = re.fullmatch(r"([1-9]\d{0,5})(?:[x×]([1-9]\d{0,5}))?px", part.strip())
        if percent:
            side = square_side(float(percent[1]), image_size)
            sizes.append((side, side))
        elif pixels:
            sizes.append((int(pixels[1]), int(pixels[2] or pixels[1])))
        else:
            among = f" in `{text}`" if part != text else ""
            raise InputError(f"a patch looks like 3%, 39px or 20x60px, not `{part}`{among}")
    return tuple(sizes)


def patch_words(text: str) -> str:
    """The text that `parse_patches` reads, in words that hold for images of any size: `3%`, or `5×5 pixels`."""
    parts = [part.strip() for part in text.split(",")]
    return " or ".join(p if p.endswith("%") else f"{size_words(*parse_patches(p, (1, 1)))} pixels" for p in parts)


def size_words(*sizes: Size) -> str:
    """Sizes in words: `39×39`, or `20×60 or 39×39`."""
    return " or ".join(f"{height}×{width}" for height, width in sizes)


def footprint_words(*sizes: Size) -> str:
    """The range of these sizes in words: `40×40 to 82×82`, or `12×12` if they are all the same."""
    heights, widths = zip(*sizes, strict=True)
    least, most = size_words((min(heights), min(widths))), size_words((max(heights), max(widths)))
    return least if least == most else f"{least} to {most}"


@dataclass(frozen=True)
class PatchThreat:
    """𝓡: one patch of any of `patch_sizes` (height, width), anywhere inside an image of `image_size`; or two at once.

    A smaller patch lies inside one of these, so the sizes are upper bounds.
    """

    image_size: Size
    patch_sizes: tuple[Size, ...]
    patches: int = 1

    def __post_init__(self) -> None:
        if type(self.patches) is not int or self.patches not in (1, 2):
            raise InputError(f"patches must be 1 or 2, not {self.patches!r}: more at once are not supported")
        height, width = whole_size(self.image_size, "image_size")
        if min(height, width) < 1:
            raise InputError(f"image_size must be at least one pixel each way, not {height}×{width}")
        given = tuple(self.patch_sizes) if isinstance(self.patch_sizes, Iterable) else (0,)
        if any(isinstance(size, int) for size in given):
            raise InputError(
                f"patch_sizes is a tuple of (height, width), e.g. ((39, 39),), not {self.patch_sizes!r:.60}"
            )
        sizes = tuple(dict.fromkeys(whole_size(size, "a patch size") for size in given))
        if not sizes:
            raise InputError("the threat names no patch size; give at least one, e.g. patch_sizes=((39, 39),)")
        for h, w in sizes:
            if not (1 <= h <= height and 1 <= w <= width):
                raise InputError(
                    f"a {h}×{w} patch does not fit a {height}×{width} image; "
                    f"choose a height of 1 to {height} and a width of 1 to {width}"
                )
        object.__setattr__(self, "image_size", (height, width))
        object.__setattr__(self, "patch_sizes", sizes)

    @classmethod
    def square(
        cls, *, image_size: Size, percent: float | None = None, pixels: int | None = None, patches: int = 1
    ) -> PatchThreat:
        """The threat of a square patch, its side given in pixels or as a percentage of the image's area."""
        if (percent is None) == (pixels is None):
            raise InputError("give the patch either in percent or in pixels, e.g. percent=3 or pixels=39")
        size = whole_size(image_size, "image_size")
        side: Any = pixels if percent is None else square_side(percent, size)
        return cls(size, ((side, side),), patches)

    @property
    def largest(self) -> Size:
        """The smallest (height, width) that contains every allowed patch."""
        return max(h for h, _ in self.patch_sizes), max(w for _, w in self.patch_sizes)

    @property
    def words(self) -> str:
        """The threat in words: `one patch of 39×39 pixels`."""
        return f"{self.how_many} of {size_words(*self.patch_sizes)} pixels"

    @property
    def how_many(self) -> str:
        """`one patch` or `two patches`."""
        return "one patch" if self.patches == 1 else "two patches"
