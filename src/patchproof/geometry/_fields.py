"""The pixels that each cell of a grid sees, and the cells that a patch can touch: A(p)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from patchproof.geometry._threat import PatchThreat
from patchproof.settings import Ablation
from patchproof.types import InputError, Size


@dataclass(frozen=True)
class Windows:
    """The sets A(p): a patch p at `places[a]` (top, left, height, width) touches exactly the cells `touched[a]`."""

    touched: Bool[Tensor, "a n"]
    places: Int64[Tensor, "a 4"]

    def to(self, device: torch.device) -> Windows:
        return Windows(self.touched.to(device), self.places.to(device))

    @property
    def sizes(self) -> Int64[Tensor, " a"]:
        """The number of cells in each A(p)."""
        return self.touched.sum(dim=1)

    @cached_property
    def maximal(self) -> Windows:
        """The windows that are no proper subset of another."""
        subset = _subset(self.touched)
        kept = ~(subset & ~subset.T).any(dim=1)
        return Windows(self.touched[kept], self.places[kept])

    def outside(self, values: Shaped[Tensor, "*b n"]) -> Shaped[Tensor, "*b a"]:
        """The sum of the values of the cells that p does not touch."""
        return values @ (~self.touched).to(values).T


@dataclass(frozen=True)
class Fields:
    """A grid of cells, numbered row by row: cell (r, q) sees pixel (i, j) iff `rows[r, i]` and `columns[q, j]`."""

    rows: Bool[Tensor, "r h"]
    columns: Bool[Tensor, "q w"]

    @classmethod
    def receptive(cls, image_size: Size, grid: Size, field: tuple[int, int, int]) -> Fields:
        """The receptive field (size, stride, offset) of a network: cell r sees `size` pixels from offset + r·stride."""
        size, stride, offset = field
        axes = []
        for pixels, cells in zip(image_size, grid, strict=True):
            pixel, start = torch.arange(pixels), offset + stride * torch.arange(cells)[:, None]
            axes.append((pixel >= start) & (pixel < start + size))
        return cls(*axes)

    @classmethod
    def bands(cls, image_size: Size, ablation: Ablation, band: int, stride: int = 1) -> Fields:
        """Views of `band` columns (rows, or blocks of both) that start at 0, stride, 2·stride, … and wrap around."""
        ablated = {"column": (False, True), "row": (True, False), "block": (True, True)}[ablation]
        axes = []
        for pixels, cut in zip(image_size, ablated, strict=True):
            width, step = (band, stride) if cut else (pixels, pixels)
            for name, value in (("band", width), ("stride", step)):
                if not 1 <= value <= pixels:
                    raise InputError(f"{name} must be from 1 to the {pixels} pixels of the image, not {value}")
            axes.append((torch.arange(pixels) - torch.arange(0, pixels, step)[:, None]) % pixels < width)
        return cls(*axes)

    def __len__(self) -> int:
        return len(self.rows) * len(self.columns)

    @property
    def image_size(self) -> Size:
        return self.rows.shape[1], self.columns.shape[1]

    def keep(self, device: torch.device | str = "cpu") -> Bool[Tensor, "n 1 h w"]:
        """True where a cell sees the image."""
        return _product(self.rows, self.columns).unflatten(1, (1, *self.image_size)).to(device)

    def touched_by(self, threat: PatchThreat, *, nested: bool = False) -> Windows:
        """A(p) for every patch of 𝓡, by counting pixels.

        A window inside another one of the same patch size is left out unless `nested`: an attacker who can reach more
        cells can do everything that one who reaches fewer can.
        """
        touched, places = [], []
        for height, width in threat.patch_sizes:
            rows, tops = _touched(self.rows, height, nested=nested)
            columns, lefts = _touched(self.columns, width, nested=nested)
            touched.append(_product(rows, columns))
            at = torch.cartesian_prod(tops, lefts)
            places.append(torch.cat([at, torch.tensor([height, width]).expand_as(at)], dim=1))
        return Windows(torch.cat(touched), torch.cat(places))


@lru_cache(maxsize=8)
def receptive_windows(
    threat: PatchThreat, grid: Size, field: tuple[int, int, int], device: torch.device, *, nested: bool = False
) -> Windows:
    """A(p) for the cells of a network with this receptive field."""
    return Fields.receptive(threat.image_size, grid, field).touched_by(threat, nested=nested).to(device)


def _product(rows: Bool[Tensor, "a r"], columns: Bool[Tensor, "b q"]) -> Bool[Tensor, "a*b r*q"]:
    """[(a, b), (r, q)]: `rows[a, r]` and `columns[b, q]`."""
    return (rows[:, None, :, None] & columns[None, :, None, :]).flatten(2).flatten(0, 1)


def _subset(sets: Bool[Tensor, "a n"]) -> Bool[Tensor, "a a"]:
    """[i, j]: set i is a subset of set j."""
    member = sets.float()
    return (member @ (1 - member).T) < 0.5


def _touched(
    seen: Bool[Tensor, "n pixels"], patch: int, *, nested: bool
) -> tuple[Bool[Tensor, "p n"], Int64[Tensor, " p"]]:
    """The distinct sets of cells that a patch touches on this axis, and a start of the patch for each.

    Only maximal sets are kept unless `nested`.
    """
    starts = torch.arange(seen.shape[1] - patch + 1)
    common = torch.nn.functional.conv1d(seen[:, None].float(), torch.ones(1, 1, patch))[:, 0].T  # [start, cell]: pixels
    touched = common > 0.5
    subset = _subset(touched)
    redundant = subset & subset.T & (starts < starts[:, None])
    if not nested:
        redundant |= subset & ~subset.T
    kept = ~redundant.any(dim=1)
    return touched[kept], starts[kept]
