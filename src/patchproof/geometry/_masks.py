"""Masks: 𝓡-covering mask sets 𝓜, the unions of their pairs, and the patch positions that a set leaves uncovered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, combinations_with_replacement, pairwise, product
from math import ceil, comb, prod

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry._threat import PatchThreat, Rect, Rects, inside, rects_of, size_words, whole_size
from patchproof.types import InputError, Size, typed

Interval = tuple[int, int]
"""[start, stop) on one axis."""

MASKS_AT_ONCE = 256
"""Masks that are drawn at once: drawing takes several times the memory of the masks."""

MOST_PAIRS = 1 << 16
"""Most masks against two patches: a table of all pairs of them would take 34 GB."""

Box = tuple[Size, range, range]
"""A patch size, and the ranges of tops and lefts of its positions."""


class Uncovered:
    """The patch positions that no mask hides; against two patches, the unordered pairs of positions.

    They are counted and listed from boxes: one box stands for every position in it, and two boxes (or one box twice)
    for every unordered pair of their positions.
    """

    def __init__(self, missed: Sequence[tuple[Box, ...]]) -> None:
        self._missed = missed

    def __repr__(self) -> str:
        return f"Uncovered({len(self):,}{f', e.g. {next(iter(self))}' if len(self) else ''})"

    def __len__(self) -> int:
        total = 0
        for boxes in self._missed:
            counts = [len(tops) * len(lefts) for _, tops, lefts in boxes]
            same_twice = len(boxes) == 2 and boxes[0] == boxes[1]
            total += comb(counts[0] + 1, 2) if same_twice else prod(counts)
        return total

    def __iter__(self) -> Iterator[Rects]:
        for boxes in self._missed:
            if len(boxes) == 1:
                yield from _positions(boxes[0])
            elif boxes[0] == boxes[1]:
                yield from combinations_with_replacement(_positions(boxes[0]), 2)
            else:
                yield from product(*map(_positions, boxes))


def _positions(box: Box) -> Iterator[Rect]:
    size, tops, lefts = box
    return (Rect(top, left, *size) for top, left in product(tops, lefts))


@dataclass(frozen=True)
class Unions:
    """The distinct unions m0 ∪ m1 of unordered pairs of masks, numbered from 0, those of a single mask first.

    Union u is m0 ∪ m1 with m0 = `first[u]` and m1 = `second[u]`; `of_pair[a, b]` is the number of a ∪ b. If one mask
    of a pair lies inside the other, their union is the number of that other mask.
    """

    first: Int64[Tensor, " unions"]
    second: Int64[Tensor, " unions"]
    of_pair: Int64[Tensor, "n n"]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class MaskSet:
    """𝓜: rectangles that hide pixels of an image; against two patches, unions of rectangles."""

    image_size: Size
    rects: tuple[Rects, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", whole_size(self.image_size))
        given = self.rects if isinstance(self.rects, Iterable) else (self.rects,)
        rects = tuple(tuple(m) if isinstance(m, Iterable) and not isinstance(m, Rect) else m for m in given)
        for rect in chain.from_iterable(mask if type(mask) is tuple else (mask,) for mask in rects):
            if not isinstance(rect, Rect):
                raise InputError(
                    f"rects holds a pp.Rect(top, left, height, width) per mask, or tuples of them, not {rect!r:.60}"
                )
        object.__setattr__(self, "rects", rects)
        if not self.rects or not all(self.parts):
            raise InputError("a mask set needs at least one mask; build one with covering_masks(threat, per_axis=3)")
        image = Rect(0, 0, *self.image_size)
        for rect in self.blocks:
            if rect.height < 1 or rect.width < 1 or not image.contains(rect):
                raise InputError(f"{rect} is empty or not inside the {image.height}×{image.width} image")

    def __len__(self) -> int:
        return len(self.rects)

    @property
    def parts(self) -> tuple[tuple[Rect, ...], ...]:
        """The rectangles of each mask."""
        return tuple(map(rects_of, self.rects))

    @cached_property
    def _single(self) -> bool:
        """True if each mask is one rectangle."""
        return all(len(part) == 1 for part in self.parts)

    @cached_property
    def blocks(self) -> tuple[Rect, ...]:
        """The distinct rectangles that the masks are made of."""
        return tuple(dict.fromkeys(rect for part in self.parts for rect in part))

    @property
    def words(self) -> str:
        """The mask set in words: `3×3 masks`, or against two patches `45 unions of 3×3 masks`."""
        try:
            grid = f"{size_words((len(self.axes[0]), len(self.axes[1])))} masks"
        except InputError:
            return f"{len(self)} masks"
        return grid if isinstance(self.rects[0], Rect) else f"{len(self)} unions of {grid}"

    def keep(self, device: torch.device | str = "cpu") -> Bool[Tensor, "n 1 h w"]:
        """True where a pixel stays visible."""
        most = max(map(len, self.parts))
        padded = torch.tensor([part + part[:1] * (most - len(part)) for part in self.parts], device=device)
        found = torch.empty(len(self), 1, *self.image_size, dtype=torch.bool, device=device)
        for visible, rects in zip(found.split(MASKS_AT_ONCE), padded.split(MASKS_AT_ONCE), strict=True):
            torch.logical_not(inside(rects, self.image_size), out=visible)
        return found

    @cached_property
    def _edges(self) -> tuple[list[int], list[int]]:
        """The rows and the columns at which a mask, or the image, begins or ends."""
        rows = sorted({0, self.image_size[0], *(edge for r in self.blocks for edge in (r.top, r.bottom))})
        columns = sorted({0, self.image_size[1], *(edge for r in self.blocks for edge in (r.left, r.right))})
        return rows, columns

    @cached_property
    def _cells(self) -> Bool[np.ndarray, "n rows columns"]:
        """The cells between the edges that each mask hides: a small table that is exact."""
        rows, columns = ({edge: place for place, edge in enumerate(edges)} for edges in self._edges)
        cells = np.zeros((len(self), len(rows) - 1, len(columns) - 1), dtype=bool)
        for cell, part in zip(cells, self.parts, strict=True):
            for r in part:
                cell[rows[r.top] : rows[r.bottom], columns[r.left] : columns[r.right]] = True
        return cells

    def hide_all(self, together: int) -> bool:
        """True if one mask, or the union of two if `together` is 2, hides the whole image."""
        height, width = self.image_size
        # Of rectangles, only those at a corner matter: others leave all four corners to the other mask.
        corner = [r for r in self.blocks if {r.top, r.bottom} & {0, height} and {r.left, r.right} & {0, width}]
        if self._single and not corner:
            return False
        few = MaskSet(self.image_size, tuple(corner)) if self._single else self
        hidden = few._cells.reshape(len(few), -1)
        if together == 1:
            return bool(hidden.all(axis=1).any())
        # One of the two hides the first pixel.
        return any(bool((hidden | mask).all(axis=1).any()) for mask in hidden[hidden[:, 0]])

    def uncovered(self, threat: PatchThreat) -> Uncovered:
        """{r ∈ 𝓡 : no m ∈ 𝓜 contains r}, empty exactly when 𝓜 is 𝓡-covering; against two patches, pairs (r, r′)."""
        if threat.image_size != self.image_size:
            raise InputError(f"the masks are for images of {self.image_size}, the threat for {threat.image_size}")
        # The cells that a patch touches change only where one of its sides crosses an edge, so positions fall into
        # boxes, and a mask hides all of a box or nothing of it.
        boxes: list[Box] = []
        hidden_parts: list[Bool[np.ndarray, "n boxes"]] = []
        for height, width in threat.patch_sizes:
            (tops, rows_touched), (lefts, columns_touched) = map(_touches, self._edges, (height, width))
            boxes += [((height, width), range(*y), range(*x)) for y, x in product(pairwise(tops), pairwise(lefts))]
            if threat.patches == 1 and self._single:  # a rectangle hides a patch if it does so on both axes
                top, left, rows, columns = np.array(self.blocks, dtype=np.int64).T[:, :, None]
                across = (top <= tops[:-1]) & (np.add(tops[:-1], height) <= top + rows)
                along = (left <= lefts[:-1]) & (np.add(lefts[:-1], width) <= left + columns)
                hidden_parts.append((across.T.astype(np.float32) @ along > 0).reshape(1, -1))
            else:  # a mask hides a patch that touches no visible cell
                visible_cells_touched = rows_touched @ (~self._cells).astype(np.float32) @ columns_touched.T
                hidden_parts.append((visible_cells_touched == 0).reshape(len(self), -1))
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
        """The row and column intervals whose products, row by row, are the masks (or the rectangles of all pairs)."""
        rows = tuple(sorted({(r.top, r.bottom) for r in self.blocks}))
        columns = tuple(sorted({(r.left, r.right) for r in self.blocks}))
        grid = _grid(rows, columns)
        if self.rects != (grid if isinstance(self.rects[0], Rect) else _pairs(grid)):
            raise InputError("these masks are not a grid of rows and columns, so they have no axes")
        return rows, columns

    def children(self, parent: Rect) -> tuple[int, ...]:
        """The fewest masks of this set, chosen axis by axis, whose union contains `parent`."""
        rows, columns = self.axes
        chosen_rows = _fewest_covering((parent.top, parent.bottom), rows)
        chosen_columns = _fewest_covering((parent.left, parent.right), columns)
        return tuple(i * len(columns) + j for i, j in product(chosen_rows, chosen_columns))

    @cached_property
    def alike(self) -> bool:
        """True if the masks are distinct rectangles of one size, as in a covering grid.

        Then different pairs have different unions: the bounding box of a union leaves two pairs of corners, and its
        top-left pixel belongs to one of them only.
        """
        same_size = len({(r.height, r.width) for r in self.blocks}) == 1
        return self._single and same_size and len(self.blocks) == len(self)

    @property
    def union_count(self) -> int:
        """An upper bound on the number of `unions`: pairs of masks, or sets of rectangles that two masks can have."""
        most = 2 * max(map(len, self.parts))
        sets = sum(comb(len(self.blocks), count) for count in range(1, most + 1))
        return min(comb(len(self) + 1, 2), sets)

    @cached_property
    def unions(self) -> Unions:
        """Every distinct m0 ∪ m1, so that no masked copy is evaluated twice."""
        every = np.arange(len(self))
        left, right = np.triu_indices(len(self), k=1)
        first, second = np.concatenate([every, left]), np.concatenate([every, right])
        if self.alike:
            numbers = named = np.arange(len(first))
        else:
            hidden = np.packbits(self._cells.reshape(len(self), -1), axis=1)
            unions = (hidden[first] | hidden[second]).view(f"V{hidden.shape[1]}")[:, 0]
            _, found, numbers = np.unique(unions, return_index=True, return_inverse=True)
            numbers = found.argsort().argsort()[numbers]  # by the first pair of each union
            named = np.sort(found)
        of_pair = np.empty((len(self), len(self)), dtype=np.int64)
        of_pair[first, second] = of_pair[second, first] = numbers
        return Unions(*map(torch.from_numpy, (first[named], second[named], of_pair)))


def _touches(edges: Sequence[int], length: int) -> tuple[list[int], Float[np.ndarray, "stretches cells"]]:
    """The starts at which a patch on one axis begins or ceases to touch a cell, and the cells touched from each on."""
    end = edges[-1] - length + 1
    starts = sorted({start for edge in edges for start in (edge, edge - length + 1) if 0 <= start <= end} | {0, end})
    cells = [[a - length < start < b for a, b in pairwise(edges)] for start in starts[:-1]]
    return starts, np.array(cells, dtype=np.float32)


def _fewest_covering(parent: Interval, small: Sequence[Interval]) -> tuple[int, ...]:
    """Fewest intervals whose union contains `parent`; of these, the smallest union; then the lowest indices."""
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


@typed
def covering_masks(threat: PatchThreat, *, per_axis: int | tuple[int, int], align: Size | None = None) -> MaskSet:
    """An 𝓡-covering grid of at most `per_axis` masks on each axis (PatchCleanser §3.2).

    Against two patches, the set holds these masks and the unions of every two of them: if one mask hides the first
    patch and another the second, their union hides both. With `align` (height, width), mask edges are multiples of it.
    """
    counts = per_axis if isinstance(per_axis, Iterable) else (per_axis, per_axis)
    rows, columns = map(_axis_masks, threat.image_size, threat.largest, counts, align or (1, 1))
    grid = _grid(rows, columns)
    if threat.patches == 2 and comb(len(grid) + 1, 2) > MOST_PAIRS:
        raise InputError(
            f"{len(grid):,} masks have {comb(len(grid), 2):,} pairs, too many to hide two patches with; take a smaller "
            "per_axis"
        )
    return MaskSet(threat.image_size, grid if threat.patches == 1 else _pairs(grid))


def _grid(rows: Sequence[Interval], columns: Sequence[Interval]) -> tuple[Rect, ...]:
    return tuple(Rect(a, c, b - a, d - c) for (a, b), (c, d) in product(rows, columns))


def _pairs(rects: Sequence[Rect]) -> tuple[tuple[Rect, ...], ...]:
    """Every rectangle alone, then every two of them."""
    return (*((rect,) for rect in rects), *combinations(rects, 2))


def _axis_masks(n: int, p: int, k: int, unit: int = 1) -> list[Interval]:
    """s = ⌈(n − p + 1)/k⌉, m = min(p + s − 1, n), starts 0, s, 2s, … clamped to n − m.

    Covering: the last row of a patch starting at i ∈ [js, (j+1)s) is at most (j+1)s − 1 + p − 1 < js + m. If edges must
    be multiples of `unit`, the same holds in units, of which a patch touches at most ⌈(p − 1)/unit⌉ + 1.
    """
    if k < 1:
        raise InputError(f"per_axis must be at least 1, not {k}")
    if n % unit:
        raise InputError(f"masks cannot be aligned to {unit} pixels in an image of {n}; choose a multiple of {unit}")
    units = n // unit
    patch = min(units, ceil((p - 1) / unit) + 1)
    stride = ceil((units - patch + 1) / k)
    side = min(patch + stride - 1, units)
    starts = sorted({min(i * stride, units - side) for i in range(min(k, units))})
    return [(start * unit, (start + side) * unit) for start in starts]
