"""What the cells of a grid see of an image, and which of them a patch can touch: A(p)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from patchproof.geometry._masks import PatchThreat
from patchproof.settings import Ablation
from patchproof.types import InputError, Size


@dataclass(frozen=True)
class Windows:
    """A(p), the cells that a patch p of 𝓡 touches; `places[a]` (top, left, height, width) is a patch that touches
    exactly the cells `touched[a]`.

    Windows that lie inside another one of their patch size are left out unless they are asked for (`nested`): a patch
    that reaches more cells can do all that one can which reaches fewer.
    """

    touched: Bool[Tensor, "a n"]
    places: Int64[Tensor, "a 4"]

    def to(self, device: torch.device) -> Windows:
        return Windows(self.touched.to(device), self.places.to(device))

    @property
    def sizes(self) -> Int64[Tensor, " a"]:
        """How many cells each A(p) has."""
        return self.touched.sum(dim=1)

    @cached_property
    def maximal(self) -> Windows:
        """Those that lie inside no other one."""
        touched = self.touched.float()
        inside = (touched @ (1 - touched).T) < 0.5  # [i, j]: is i in j?
        left = ~(inside & ~inside.T).any(dim=1)
        return Windows(self.touched[left], self.places[left])

    def outside(self, values: Shaped[Tensor, "*b n"]) -> Shaped[Tensor, "*b a"]:
        """Σ over the cells that p does not touch."""
        return values @ (~self.touched).to(values).T


@dataclass(frozen=True)
class Fields:
    """Cell (r, q) of a grid sees the pixel (i, j) iff `rows[r, i]` and `columns[q, j]`, counted row by row."""

    rows: Bool[Tensor, "r h"]
    columns: Bool[Tensor, "q w"]

    @classmethod
    def receptive(cls, image_size: Size, grid: Size, field: tuple[int, int, int]) -> Fields:
        """Of a network: cell r sees the pixels from offset + r·stride on, `size` of them; (size, stride, offset)."""
        (size, stride, offset), axes = field, []
        for pixels, cells in zip(image_size, grid, strict=True):
            start, pixel = offset + stride * torch.arange(cells)[:, None], torch.arange(pixels)
            axes.append((pixel >= start) & (pixel < start + size))
        return cls(*axes)

    @classmethod
    def bands(cls, image_size: Size, ablation: Ablation, band: int, stride: int = 1) -> Fields:
        """Views of `band` columns (rows, or blocks of both) that start at 0, stride, 2·stride, … and wrap around."""
        ablated, axes = {"column": (False, True), "row": (True, False), "block": (True, True)}[ablation], []
        for pixels, cut in zip(image_size, ablated, strict=True):
            if cut and not 1 <= band <= pixels:
                raise InputError(f"band must be from 1 to the {pixels} pixels of the image, not {band}")
            if cut and not 1 <= stride <= pixels:
                raise InputError(f"stride must be from 1 to the {pixels} pixels of the image, not {stride}")
            starts = torch.arange(0, pixels, stride if cut else pixels)[:, None]
            axes.append((torch.arange(pixels) - starts) % pixels < (band if cut else pixels))
        return cls(*axes)

    def __len__(self) -> int:
        return len(self.rows) * len(self.columns)

    @property
    def image_size(self) -> Size:
        return self.rows.shape[1], self.columns.shape[1]

    def keep(self, device: torch.device | str = "cpu") -> Bool[Tensor, "n 1 h w"]:
        """True where a cell sees the image."""
        seen = self.rows[:, None, :, None] & self.columns[None, :, None, :]
        return seen.flatten(0, 1)[:, None].to(device)

    def touched_by(self, threat: PatchThreat, *, nested: bool = False) -> Windows:
        """A(p) for every patch of 𝓡, by counting pixels; with `nested`, also those inside another one."""
        touched, places = [], []
        for height, width in threat.patch_sizes:
            rows, tops = _touched(self.rows, height, nested=nested)
            columns, lefts = _touched(self.columns, width, nested=nested)
            touched.append((rows[:, None, :, None] & columns[None, :, None, :]).flatten(2).flatten(0, 1))
            at = torch.cartesian_prod(tops, lefts)
            places.append(torch.cat([at, torch.tensor([height, width]).expand_as(at)], dim=1))
        return Windows(torch.cat(touched), torch.cat(places))


@lru_cache(maxsize=8)
def receptive_windows(
    threat: PatchThreat, grid: Size, field: tuple[int, int, int], device: torch.device, *, nested: bool = False
) -> Windows:
    """A(p) for the cells of a network with this receptive field."""
    return Fields.receptive(threat.image_size, grid, field).touched_by(threat, nested=nested).to(device)


def _touched(
    seen: Bool[Tensor, "n pixels"], patch: int, *, nested: bool
) -> tuple[Bool[Tensor, "p n"], Int64[Tensor, " p"]]:
    """The distinct sets of cells that see part of a patch on this axis, and a start for each; unless `nested`, none
    inside another."""
    windows = torch.ones(1, patch, dtype=torch.float32)
    starts = torch.arange(seen.shape[1] - patch + 1)
    counts = torch.nn.functional.conv1d(seen[:, None].float(), windows[None])[:, 0].T  # [start, cell]: pixels in common
    touched = (counts > 0.5).float()
    missed = touched @ (1 - touched).T  # [i, j]: cells of i that are not in j
    inside, equal = missed < 0.5, (missed < 0.5) & (missed.T < 0.5)
    redundant = equal & (starts[None] < starts[:, None])
    if not nested:
        redundant |= inside & ~equal
    left = ~redundant.any(dim=1)
    return touched[left].bool(), starts[left]
