"""Where a patch can be at the network input and which masks hide it: 𝓡 and 𝓜."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations, product
from math import isqrt
from operator import index
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from patchproof.types import InputError, Size

Interval = tuple[int, int]
"""[start, stop) on one axis."""


@dataclass(frozen=True, order=True)
class Rect:
    """Rows [top, top + height), columns [left, left + width)."""

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


def inside(places: Int64[Tensor, "p 4"], image_size: Size) -> Bool[Tensor, "p 1 h w"]:
    """True on the pixels of each place (top, left, height, width)."""
    tops, lefts, heights, widths = places.T[..., None, None]
    rows = torch.arange(image_size[0], device=places.device)[:, None]
    columns = torch.arange(image_size[1], device=places.device)
    found = (rows >= tops) & (rows < tops + heights) & (columns >= lefts) & (columns < lefts + widths)
    return found[:, None]


def whole_size(size: Sequence[int], name: str = "a size") -> Size:
    """(height, width) as a tuple of plain integers, whatever sequence and integer type they came in."""
    try:
        height, width = map(index, size)
    except (TypeError, ValueError) as error:
        example = (size, size) if isinstance(size, int) else (224, 224)
        raise InputError(f"{name} must be (height, width) in whole pixels, e.g. {example}, not {size!r:.60}") from error
    return height, width


def square_side(percent: float, image_size: Size) -> int:
    """The smallest s with s² ≥ percent/100 · H·W, in exact arithmetic: 1/2/3% = 23/32/39 at 224."""
    if not 0 < percent <= 100:
        raise InputError(f"a patch covers more than 0 and at most 100 percent of the image, not {percent:g}")
    area = Fraction(str(percent)) * image_size[0] * image_size[1] / 100
    side = isqrt(area.numerator // area.denominator)
    return side if side * side >= area else side + 1


def parse_size(text: str) -> Size:
    """`224` or `224x320` (height x width)."""
    match = re.fullmatch(r"(\d{1,4})(?:[x×](\d{1,4}))?", text.strip())
    if not match or 0 in (size := (int(match[1]), int(match[2] or match[1]))):
        raise InputError(f"an image size looks like 224 or 224x320 (height x width), 1 to 9999 pixels, not `{text}`")
    return size


def parse_patches(text: str, image_size: Size) -> tuple[Size, ...]:
    """`3%`, `39px`, `20x60px`, or several of them with commas, in pixels of an image of this size."""
    sizes = []
    for part in text.split(","):
        percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", part.strip())
        pixels = re.fullmatch(r"([1-9]\d{0,5})(?:[x×]([1-9]\d{0,5}))?px", part.strip())
        if percent:
            sizes.append((square_side(float(percent[1]), image_size),) * 2)
        elif pixels:
            sizes.append((int(pixels[1]), int(pixels[2] or pixels[1])))
        else:
            raise InputError(f"a patch looks like 3%, 39px or 20x60px, not `{part}`")
    return tuple(sizes)


def size_words(*sizes: Size) -> str:
    """`39×39`, or `20×60 or 39×39`."""
    return " or ".join(f"{height}×{width}" for height, width in sizes)


@dataclass(frozen=True)
class PatchThreat:
    """𝓡: one patch of any of `patch_sizes` (height, width), anywhere inside an image of `image_size`.

    A smaller patch lies inside one of these, so the sizes are upper bounds.
    """

    image_size: Size
    patch_sizes: tuple[Size, ...]
    patches: int = 1

    def __post_init__(self) -> None:
        if self.patches != 1:
            raise InputError(f"patches must be 1, not {self.patches}: several patches at once are not supported yet")
        object.__setattr__(self, "image_size", whole_size(self.image_size, "image_size"))
        sizes: Any = self.patch_sizes or ()
        if not isinstance(sizes, Iterable) or any(isinstance(size, int) for size in sizes):
            raise InputError(f"patch_sizes is a tuple of (height, width), e.g. ((39, 39),), not {sizes!r:.60}")
        object.__setattr__(self, "patch_sizes", tuple(whole_size(size, "a patch size") for size in sizes))
        height, width = self.image_size
        if height < 1 or width < 1:
            raise InputError(f"the image must have at least one pixel, not {height}×{width}")
        if not self.patch_sizes:
            raise InputError("the threat names no patch size; give at least one, e.g. patch_sizes=((39, 39),)")
        for h, w in self.patch_sizes:
            if not (1 <= h <= height and 1 <= w <= width):
                raise InputError(
                    f"a {h}×{w} patch does not fit a {height}×{width} image; "
                    f"choose a height of 1 to {height} and a width of 1 to {width}"
                )

    @classmethod
    def square(cls, *, image_size: Size, percent: float | None = None, pixels: int | None = None) -> PatchThreat:
        """One square patch, its side in pixels or as a share of the image's area."""
        if (percent is None) == (pixels is None):
            raise InputError("give the patch either in percent or in pixels, e.g. percent=3 or pixels=39")
        size = whole_size(image_size, "image_size")
        side = pixels if pixels is not None else square_side(percent, size)  # type: ignore[arg-type]
        return cls(size, ((side, side),))

    @property
    def largest(self) -> Size:
        """The smallest (height, width) that contains every allowed patch."""
        return max(h for h, _ in self.patch_sizes), max(w for _, w in self.patch_sizes)


class Uncovered(Sequence[Rect]):
    """The patch positions that no mask hides, counted by arithmetic and listed only when asked for."""

    def __init__(self, boxes: Sequence[tuple[Size, Interval, Interval]]) -> None:
        self._boxes = tuple(boxes)  # (patch size, tops, lefts): disjoint boxes of positions

    def __len__(self) -> int:
        return sum((bottom - top) * (right - left) for _, (top, bottom), (left, right) in self._boxes)

    def __iter__(self) -> Iterator[Rect]:
        for (height, width), tops, lefts in self._boxes:
            for top, left in product(range(*tops), range(*lefts)):
                yield Rect(top, left, height, width)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        chosen = range(len(self))[index]
        if isinstance(chosen, range):
            return [self[i] for i in chosen]
        for (height, width), (top, bottom), (left, right) in self._boxes:
            row, column = divmod(chosen, right - left)
            if row < bottom - top:
                return Rect(top + row, left + column, height, width)
            chosen -= (bottom - top) * (right - left)
        raise IndexError(index)

    def __repr__(self) -> str:
        return f"<{len(self)} uncovered patch positions>"


@dataclass(frozen=True)
class Unions:
    """The distinct m0 ∪ m1 over unordered pairs: `first[u]`, `second[u]` name one pair each, `of_pair[a, b]` is u.

    The one-mask unions come first. A pair whose one mask lies inside the other is that other mask.
    """

    first: Int64[Tensor, " unions"]
    second: Int64[Tensor, " unions"]
    of_pair: Int64[Tensor, "n n"]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class MaskSet:
    """𝓜: rectangles that hide pixels of an image."""

    image_size: Size
    rects: tuple[Rect, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", whole_size(self.image_size))
        object.__setattr__(self, "rects", tuple(self.rects))
        image = Rect(0, 0, *self.image_size)
        if not self.rects:
            raise InputError("a mask set needs at least one mask; build one with covering_masks(threat, per_axis=3)")
        for rect in self.rects:
            if rect.height < 1 or rect.width < 1 or not image.contains(rect):
                raise InputError(f"{rect} is empty or not inside the {image.height}×{image.width} image")

    def __len__(self) -> int:
        return len(self.rects)

    def keep(self, device: torch.device | str = "cpu") -> Bool[Tensor, "n 1 h w"]:
        """True where a pixel stays visible."""
        places = torch.tensor([(r.top, r.left, r.height, r.width) for r in self.rects], device=device)
        return ~inside(places, self.image_size)

    def uncovered(self, threat: PatchThreat) -> Uncovered:
        """{r ∈ 𝓡 : no m ∈ 𝓜 contains r}, empty exactly when 𝓜 is 𝓡-covering."""
        if threat.image_size != self.image_size:
            raise InputError(f"the masks are for images of {self.image_size}, the threat for {threat.image_size}")
        # A mask hides the patches whose top-left corner lies in a box; the boxes' edges cut the plane of corners into
        # at most (2n + 1)² cells, and a cell is hidden as a whole or not at all.
        missed: list[tuple[Size, Interval, Interval]] = []
        for height, width in dict.fromkeys(threat.patch_sizes):
            boxes = [(r.top, r.bottom - height + 1, r.left, r.right - width + 1) for r in self.rects]
            boxes = [b for b in boxes if b[0] < b[1] and b[2] < b[3]]
            rows = sorted({0, self.image_size[0] - height + 1, *(edge for b in boxes for edge in b[:2])})
            columns = sorted({0, self.image_size[1] - width + 1, *(edge for b in boxes for edge in b[2:])})
            hidden = np.zeros((len(rows) - 1, len(columns) - 1), dtype=bool)
            for top, bottom, left, right in boxes:
                hidden[rows.index(top) : rows.index(bottom), columns.index(left) : columns.index(right)] = True
            for i, j in np.argwhere(~hidden).tolist():
                missed.append(((height, width), (rows[i], rows[i + 1]), (columns[j], columns[j + 1])))
        return Uncovered(missed)

    @cached_property
    def axes(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        """The row and column intervals whose product, row by row, is this mask set."""
        rows = tuple(sorted({(r.top, r.bottom) for r in self.rects}))
        columns = tuple(sorted({(r.left, r.right) for r in self.rects}))
        grid = tuple(Rect(a, c, b - a, d - c) for (a, b), (c, d) in product(rows, columns))
        if grid != self.rects:
            raise InputError("these masks are not a grid of rows and columns, so they have no axes")
        return rows, columns

    def children(self, parent: Rect) -> tuple[int, ...]:
        """The fewest masks of this set, axis by axis, whose union contains `parent`."""
        rows, columns = self.axes
        chosen_rows = _fewest_covering((parent.top, parent.bottom), rows)
        chosen_columns = _fewest_covering((parent.left, parent.right), columns)
        return tuple(i * len(columns) + j for i, j in product(chosen_rows, chosen_columns))

    @cached_property
    def alike(self) -> bool:
        """Different masks of one size, as a covering grid has them. Then different pairs have different unions: the
        bounding box of a union leaves two pairs of corners, and its top-left pixel belongs to one of them only."""
        same_size = len({(r.height, r.width) for r in self.rects}) == 1
        return same_size and len(set(self.rects)) == len(self.rects)

    @property
    def union_count(self) -> int:
        """How many `unions` there are; where the masks are alike, they are not made for it."""
        return len(self) * (len(self) + 1) // 2 if self.alike else len(self.unions)

    @cached_property
    def unions(self) -> Unions:
        """Every distinct m0 ∪ m1, so that no masked copy is evaluated twice."""
        if self.alike:
            every, (a, b) = torch.arange(len(self)), torch.triu_indices(len(self), len(self), offset=1)
            of_pair = torch.empty(len(self), len(self), dtype=torch.int64)
            of_pair[every, every] = every
            of_pair[a, b] = of_pair[b, a] = len(self) + torch.arange(len(a))
            return Unions(torch.cat([every, a]), torch.cat([every, b]), of_pair)
        # Each mask as a set of the cells that all masks' edges cut the image into: small, and exact.
        rows = sorted({edge for r in self.rects for edge in (r.top, r.bottom)})
        columns = sorted({edge for r in self.rects for edge in (r.left, r.right)})
        cells = np.zeros((len(self), len(rows), len(columns)), dtype=bool)
        for cell, r in zip(cells, self.rects, strict=True):
            cell[rows.index(r.top) : rows.index(r.bottom), columns.index(r.left) : columns.index(r.right)] = True
        ids: dict[bytes, int] = {}
        named: list[tuple[int, int]] = []
        of_pair = torch.empty(len(self), len(self), dtype=torch.int64)
        for a, b in [*((a, a) for a in range(len(self))), *combinations(range(len(self)), 2)]:
            union = ids.setdefault((cells[a] | cells[b]).tobytes(), len(named))
            if union == len(named):
                named.append((a, b))
            of_pair[a, b] = of_pair[b, a] = union
        first, second = torch.tensor(named).T
        return Unions(first, second, of_pair)


def _fewest_covering(parent: Interval, small: Sequence[Interval]) -> tuple[int, ...]:
    """Fewest intervals whose union contains `parent`; then those that stick out least; then the lowest indices."""
    touching = [i for i, (start, stop) in enumerate(small) if start < parent[1] and stop > parent[0]]
    for count in range(1, len(touching) + 1):
        covering = []
        for chosen in combinations(touching, count):
            union = {x for i in chosen for x in range(*small[i])}
            if union.issuperset(range(*parent)):
                covering.append((len(union), chosen))
        if covering:
            return min(covering)[1]
    raise InputError(
        f"no set of the finer masks' intervals {list(small)} covers [{parent[0]}, {parent[1]}); "
        "take a finer mask set that covers the same image, e.g. covering_masks of the same threat with more per axis"
    )


def covering_masks(threat: PatchThreat, *, per_axis: int | tuple[int, int]) -> MaskSet:
    """An 𝓡-covering grid of at most `per_axis` masks on each axis (PatchCleanser §3.2)."""
    if not isinstance(threat, PatchThreat):
        raise InputError(
            f"threat must be a pp.PatchThreat, e.g. pp.PatchThreat((224, 224), ((39, 39),)), not {threat!r}"
        )
    counts = per_axis if isinstance(per_axis, tuple) else (per_axis, per_axis)
    if len(counts) != 2 or not all(isinstance(count, int) for count in counts):
        raise InputError(f"per_axis must be a whole number, or one for rows and one for columns, not {per_axis!r}")
    row_count, column_count = counts
    height, width = threat.largest
    rows = _axis_masks(threat.image_size[0], height, row_count)
    columns = _axis_masks(threat.image_size[1], width, column_count)
    rects = tuple(Rect(a, c, b - a, d - c) for (a, b), (c, d) in product(rows, columns))
    return MaskSet(threat.image_size, rects)


def _axis_masks(n: int, p: int, k: int) -> list[Interval]:
    """s = ⌈(n − p + 1)/k⌉, m = min(p + s − 1, n), starts 0, s, 2s, … clamped to n − m.

    Covering: the last row of a patch starting at i ∈ [js, (j+1)s) is at most (j+1)s − 1 + p − 1 < js + m.
    """
    if k < 1:
        raise InputError(f"per_axis must be at least 1, not {k}")
    stride = -(-(n - p + 1) // k)
    side = min(p + stride - 1, n)
    starts = sorted({min(i * stride, n - side) for i in range(k)})
    return [(start, start + side) for start in starts]
