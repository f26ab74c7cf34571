"""Where a patch can be at the network input and which masks hide it: 𝓡 and 𝓜."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations, combinations_with_replacement, pairwise, product
from math import comb, isqrt, prod
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.types import InputError, Size, note

Interval = tuple[int, int]
"""[start, stop) on one axis."""

Box = tuple[Size, range, range]
"""A patch size, and the tops and lefts of its positions."""


class Rect(NamedTuple):
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


Rects = Rect | tuple[Rect, ...]
"""One rectangle, or the union of several."""


def rects_of(shape: Rects) -> tuple[Rect, ...]:
    return (shape,) if isinstance(shape, Rect) else shape


def inside(places: Int64[Tensor, "p *k 4"], image_size: Size) -> Bool[Tensor, "p 1 h w"]:
    """True on the pixels of each place (top, left, height, width), or of its k rectangles."""
    tops, lefts, heights, widths = places.unflatten(0, (-1, 1))[..., None, None].movedim(-3, 0).flatten(2, -3)
    rows = torch.arange(image_size[0], device=places.device)[:, None]
    columns = torch.arange(image_size[1], device=places.device)
    found = (rows >= tops) & (rows < tops + heights) & (columns >= lefts) & (columns < lefts + widths)
    return found.any(dim=1, keepdim=True)


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
    if isinstance(percent, str):
        raise InputError(f"percent must be a number, e.g. 3, not {percent!r}")
    if not 0 < percent <= 100:
        raise InputError(f"a patch covers more than 0 and at most 100 percent of the image, not {percent:g}")
    area = Fraction(str(percent)) * image_size[0] * image_size[1] / 100
    side = isqrt(area.numerator // area.denominator)
    side += side * side < area
    if percent < 0.1:
        note(f"{percent:g} percent of the image is a patch of {side}×{side} pixels; for three percent give 3")
    return side


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
            among = f" in `{text}`" if part != text else ""
            raise InputError(f"a patch looks like 3%, 39px or 20x60px, not `{part}`{among}")
    return tuple(sizes)


def patch_words(text: str) -> str:
    """`3%`, or `5×5 pixels` for `5px`: what `parse_patches` reads, for images of any size."""
    parts = [part.strip() for part in text.split(",")]
    return " or ".join(p if p.endswith("%") else f"{size_words(*parse_patches(p, (1, 1)))} pixels" for p in parts)


def size_words(*sizes: Size) -> str:
    """`39×39`, or `20×60 or 39×39`."""
    return " or ".join(f"{height}×{width}" for height, width in sizes)


def footprint_words(*sizes: Size) -> str:
    """`12×12`, or `40×40 to 82×82`: the smallest and largest sides of the footprints of a patch on original images."""
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
        object.__setattr__(self, "image_size", whole_size(self.image_size, "image_size"))
        if min(self.image_size) < 1:
            raise InputError(f"image_size must be at least one pixel each way, not {size_words(self.image_size)}")
        sizes: Any = self.patch_sizes or ()
        if not isinstance(sizes, Iterable) or any(isinstance(size, int) for size in sizes):
            raise InputError(f"patch_sizes is a tuple of (height, width), e.g. ((39, 39),), not {sizes!r:.60}")
        sizes = dict.fromkeys(whole_size(size, "a patch size") for size in sizes)
        object.__setattr__(self, "patch_sizes", tuple(sizes))
        height, width = self.image_size
        if not self.patch_sizes:
            raise InputError("the threat names no patch size; give at least one, e.g. patch_sizes=((39, 39),)")
        for h, w in self.patch_sizes:
            if not (1 <= h <= height and 1 <= w <= width):
                raise InputError(
                    f"a {h}×{w} patch does not fit a {height}×{width} image; "
                    f"choose a height of 1 to {height} and a width of 1 to {width}"
                )

    @classmethod
    def square(
        cls, *, image_size: Size, percent: float | None = None, pixels: int | None = None, patches: int = 1
    ) -> PatchThreat:
        """A square patch, its side in pixels or as a share of the image's area."""
        if (percent is None) == (pixels is None):
            raise InputError("give the patch either in percent or in pixels, e.g. percent=3 or pixels=39")
        size = whole_size(image_size, "image_size")
        side = pixels if pixels is not None else square_side(percent, size)  # type: ignore[arg-type]
        return cls(size, ((side, side),), patches)

    @property
    def largest(self) -> Size:
        """The smallest (height, width) that contains every allowed patch."""
        return max(h for h, _ in self.patch_sizes), max(w for _, w in self.patch_sizes)

    @property
    def words(self) -> str:
        """`one patch of 39×39 pixels`."""
        return f"{self.how_many} of {size_words(*self.patch_sizes)} pixels"

    @property
    def how_many(self) -> str:
        return "one patch" if self.patches == 1 else "two patches"


class Uncovered:
    """The patch positions that no mask hides; of two patches, the pairs of them in no order. Counted by arithmetic.

    A box stands for every position in it; a pair of boxes, or of one with itself, for every pair of their positions.
    """

    def __init__(self, missed: Sequence[tuple[Box, ...]]) -> None:
        self._missed = missed

    def __len__(self) -> int:
        total = 0
        for boxes in self._missed:
            counts = [len(tops) * len(lefts) for _, tops, lefts in boxes]
            total += prod(counts) if len(set(boxes)) == len(boxes) else comb(counts[0] + 1, 2)
        return total

    def __iter__(self) -> Iterator[Rects]:
        def positions(box: Box) -> Iterator[Rect]:
            size, tops, lefts = box
            return (Rect(*at, *size) for at in product(tops, lefts))

        for boxes in self._missed:
            if len(boxes) == 1:
                yield from positions(boxes[0])
            elif boxes[0] == boxes[1]:
                yield from combinations_with_replacement(positions(boxes[0]), 2)
            else:
                yield from product(*map(positions, boxes))


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
    """𝓜: rectangles that hide pixels of an image; against two patches, unions of them."""

    image_size: Size
    rects: tuple[Rects, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", whole_size(self.image_size))
        rects = tuple(mask if isinstance(mask, Rect) else tuple(mask) for mask in self.rects)
        object.__setattr__(self, "rects", rects)
        image = Rect(0, 0, *self.image_size)
        if not all(self.parts) or not self.rects:
            raise InputError("a mask set needs at least one mask; build one with covering_masks(threat, per_axis=3)")
        for rect in self.blocks:
            if rect.height < 1 or rect.width < 1 or not image.contains(rect):
                raise InputError(f"{rect} is empty or not inside the {image.height}×{image.width} image")

    def __len__(self) -> int:
        return len(self.rects)

    @property
    def parts(self) -> tuple[tuple[Rect, ...], ...]:
        """The rectangles of each mask."""
        return tuple(map(rects_of, self.rects))

    @property
    def words(self) -> str:
        """`3×3 masks`, or against two patches `45 unions of 3×3 masks`."""
        try:
            grid = f"{size_words((len(self.axes[0]), len(self.axes[1])))} masks"
        except InputError:
            return f"{len(self)} masks"
        return grid if isinstance(self.rects[0], Rect) else f"{len(self)} unions of {grid}"

    @cached_property
    def blocks(self) -> tuple[Rect, ...]:
        """The different rectangles that the masks are made of."""
        return tuple(dict.fromkeys(rect for part in self.parts for rect in part))

    def keep(self, device: torch.device | str = "cpu") -> Bool[Tensor, "n 1 h w"]:
        """True where a pixel stays visible."""
        most = max(map(len, self.parts))
        padded = [part + part[:1] * (most - len(part)) for part in self.parts]
        return ~inside(torch.tensor(padded, device=device), self.image_size)

    @cached_property
    def _cells(self) -> tuple[list[int], list[int], Bool[np.ndarray, "n rows columns"]]:
        """The edges of all masks, and which of the cells that they cut the image into each mask hides: small, exact."""
        rows = sorted({0, self.image_size[0], *(edge for r in self.blocks for edge in (r.top, r.bottom))})
        columns = sorted({0, self.image_size[1], *(edge for r in self.blocks for edge in (r.left, r.right))})
        cells = np.zeros((len(self), len(rows) - 1, len(columns) - 1), dtype=bool)
        for cell, part in zip(cells, self.parts, strict=True):
            for r in part:
                cell[rows.index(r.top) : rows.index(r.bottom), columns.index(r.left) : columns.index(r.right)] = True
        return rows, columns, cells

    def hide_all(self, together: int) -> bool:
        """Whether one mask, or `together` = 2 of them, can hide the whole image."""
        hidden = self._cells[2].reshape(len(self), -1)
        if together == 1:
            return bool(hidden.all(axis=1).any())
        # One of the two hides the first pixel.
        return any(bool((hidden | mask).all(axis=1).any()) for mask in hidden[hidden[:, 0]])

    def uncovered(self, threat: PatchThreat) -> Uncovered:
        """{r ∈ 𝓡 : no m ∈ 𝓜 contains r}, empty exactly when 𝓜 is 𝓡-covering; of two patches, the pairs (r, r′)."""
        if threat.image_size != self.image_size:
            raise InputError(f"the masks are for images of {self.image_size}, the threat for {threat.image_size}")
        # A mask hides a patch that touches no visible cell. Which cells it touches changes only where one of its sides
        # crosses an edge, so its top-left corners fall into boxes that are hidden as a whole or not at all.
        rows, columns, cells = self._cells
        boxes: list[Box] = []
        hidden_parts: list[Bool[np.ndarray, "n boxes"]] = []
        for height, width in threat.patch_sizes:
            (tops, down), (lefts, across) = _touches(rows, height), _touches(columns, width)
            hidden_parts.append((down @ (~cells).astype(np.float32) @ across.T == 0).reshape(len(self), -1))
            boxes += [((height, width), range(*y), range(*x)) for y, x in product(pairwise(tops), pairwise(lefts))]
        hidden = np.concatenate(hidden_parts, axis=1)
        if threat.patches == 1:
            return Uncovered([(boxes[number],) for number in np.flatnonzero(~hidden.any(axis=0))])
        missed: list[tuple[Box, ...]] = []
        for first, box in enumerate(boxes):
            together = hidden[hidden[:, first]].any(axis=0)
            missed += [(box, other) for other, both in zip(boxes[first:], together[first:], strict=True) if not both]
        return Uncovered(missed)

    @cached_property
    def axes(self) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
        """The row and column intervals whose product, row by row, is this mask set, or what its pairs are made of."""
        rows = tuple(sorted({(r.top, r.bottom) for r in self.blocks}))
        columns = tuple(sorted({(r.left, r.right) for r in self.blocks}))
        grid = tuple(Rect(a, c, b - a, d - c) for (a, b), (c, d) in product(rows, columns))
        if self.rects not in (grid, _pairs(grid)):
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
        same_size = len({(r.height, r.width) for r, *_ in self.parts}) == 1
        return same_size and len(set(self.rects)) == len(self.rects) and all(len(part) == 1 for part in self.parts)

    @property
    def union_count(self) -> int:
        """How many `unions` there are at most, without making them: as many as pairs, and as sets of the rectangles
        that two masks have. There are fewer where a rectangle lies inside a union of others."""
        most = 2 * max(map(len, self.parts))
        sets = sum(comb(len(self.blocks), count) for count in range(1, most + 1))
        return min(len(self) * (len(self) + 1) // 2, sets)

    @cached_property
    def unions(self) -> Unions:
        """Every distinct m0 ∪ m1, so that no masked copy is evaluated twice."""
        if self.alike:
            every, (a, b) = torch.arange(len(self)), torch.triu_indices(len(self), len(self), offset=1)
            of_pair = torch.empty(len(self), len(self), dtype=torch.int64)
            of_pair[every, every] = every
            of_pair[a, b] = of_pair[b, a] = len(self) + torch.arange(len(a))
            return Unions(torch.cat([every, a]), torch.cat([every, b]), of_pair)
        hidden = np.packbits(self._cells[2].reshape(len(self), -1), axis=1)
        single, (left, right) = np.arange(len(self)), np.triu_indices(len(self), 1)
        first, second = np.concatenate([single, left]), np.concatenate([single, right])
        pairs = hidden[first] | hidden[second]
        _, named, union = np.unique(pairs.view(f"V{pairs.shape[1]}")[:, 0], return_index=True, return_inverse=True)
        order = named.argsort()  # in the order of the pairs, of which `named` has the first of each union
        numbers = np.empty((len(self), len(self)), dtype=np.int64)
        numbers[first, second] = numbers[second, first] = order.argsort()[union]
        return Unions(*map(torch.from_numpy, (first[named[order]], second[named[order]], numbers)))


def _touches(edges: Sequence[int], length: int) -> tuple[list[int], Float[np.ndarray, "starts cells"]]:
    """Where a patch of this length may start on an axis, cut where it begins or ends to touch a cell between two edges
    (with the end of the last stretch); and which cells it touches from each start on."""
    end = edges[-1] - length + 1
    starts = sorted({start for edge in edges for start in (edge, edge - length + 1) if 0 <= start <= end} | {0, end})
    cells = [[a - length < start < b for a, b in pairwise(edges)] for start in starts[:-1]]
    return starts, np.array(cells, dtype=np.float32)


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


def covering_masks(threat: PatchThreat, *, per_axis: int | tuple[int, int], align: Size | None = None) -> MaskSet:
    """An 𝓡-covering grid of at most `per_axis` masks on each axis (PatchCleanser §3.2).

    Against two patches, these and the unions of every two of them: a union of the masks that hide one patch each hides
    both. With `align` (height, width), their edges are at multiples of it.
    """
    if not isinstance(threat, PatchThreat):
        raise InputError(
            f"threat must be a pp.PatchThreat, e.g. pp.PatchThreat((224, 224), ((39, 39),)), not {threat!r}"
        )
    counts = per_axis if isinstance(per_axis, tuple) else (per_axis, per_axis)
    if len(counts) != 2 or not all(isinstance(count, int) for count in counts):
        raise InputError(f"per_axis must be a whole number, or one for rows and one for columns, not {per_axis!r}")
    rows, columns = map(_axis_masks, threat.image_size, threat.largest, counts, align or (1, 1))
    rects = tuple(Rect(a, c, b - a, d - c) for (a, b), (c, d) in product(rows, columns))
    return MaskSet(threat.image_size, rects if threat.patches == 1 else _pairs(rects))


def _pairs(rects: Sequence[Rect]) -> tuple[tuple[Rect, ...], ...]:
    """Every rectangle alone, then the unions of two."""
    return (*((rect,) for rect in rects), *combinations(rects, 2))


def _axis_masks(n: int, p: int, k: int, unit: int = 1) -> list[Interval]:
    """s = ⌈(n − p + 1)/k⌉, m = min(p + s − 1, n), starts 0, s, 2s, … clamped to n − m.

    Covering: the last row of a patch starting at i ∈ [js, (j+1)s) is at most (j+1)s − 1 + p − 1 < js + m. In units of
    several pixels the same holds of the units that a patch touches: at most ⌈(p − 1)/unit⌉ + 1.
    """
    if k < 1:
        raise InputError(f"per_axis must be at least 1, not {k}")
    if n % unit:
        raise InputError(f"masks cannot be aligned to {unit} pixels in an image of {n}; choose a multiple of {unit}")
    if unit > 1:
        touched = min(n // unit, -(-(p - 1) // unit) + 1)
        return [(start * unit, stop * unit) for start, stop in _axis_masks(n // unit, touched, k)]
    stride = -(-(n - p + 1) // k)
    side = min(p + stride - 1, n)
    starts = sorted({min(i * stride, n - side) for i in range(k)})
    return [(start, start + side) for start in starts]
