"""Places of a patch as rows (top, left, height, width) of one tensor, so that tens of thousands are ranked at once."""

from __future__ import annotations

import math
from itertools import product

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry._masks import PatchThreat, Rect


def as_rects(places: Int64[Tensor, "p 4"]) -> tuple[Rect, ...]:
    return tuple(Rect(*row) for row in places.tolist())


def all_places(threat: PatchThreat) -> Int64[Tensor, "p 4"]:
    """Every patch of 𝓡, size by size and row by row."""
    height, width = threat.image_size
    sizes = dict.fromkeys(threat.patch_sizes)
    return torch.tensor([(*at, h, w) for h, w in sizes for at in product(range(height - h + 1), range(width - w + 1))])


def grid_places(threat: PatchThreat, count: int) -> Int64[Tensor, "p 4"]:
    """At most `count` places, evenly taken from a k × k grid for each patch size, k as small as gives so many."""
    height, width = threat.image_size
    sizes = dict.fromkeys(threat.patch_sizes)
    k = math.ceil(math.sqrt(count / len(sizes)))

    def middles(span: int) -> list[int]:
        """Of k equal parts of [0, span]."""
        return sorted({(2 * i + 1) * span // (2 * k) for i in range(k)})

    grid = torch.tensor([(*at, h, w) for h, w in sizes for at in product(middles(height - h), middles(width - w))])
    return grid[[i * len(grid) // count for i in range(count)]] if len(grid) > count else grid


def mass_inside(maps: Float[Tensor, "b h w"], places: Int64[Tensor, "p 4"]) -> Float[Tensor, "b p"]:
    """The sum of each map over the pixels of each place, from one integral image per map."""
    integral = torch.nn.functional.pad(maps.cumsum(dim=1).cumsum(dim=2), (1, 0, 1, 0))
    top, left, height, width = places.to(maps.device).unbind(dim=1)
    bottom, right = top + height, left + width
    return integral[:, bottom, right] - integral[:, top, right] - integral[:, bottom, left] + integral[:, top, left]


def hidden_by(places: Int64[Tensor, "p 4"], keep: Bool[Tensor, "n 1 h w"]) -> Bool[Tensor, "p n"]:
    """Which mask hides which place entirely?"""
    return mass_inside(keep[:, 0].float(), places).T == 0  # pixels are counted in whole numbers below 2²⁴: exact


def best_places(score: Float[Tensor, "b p"], places: Int64[Tensor, "p 4"], count: int) -> Int64[Tensor, "b count"]:
    """The places of highest score, each at least half a patch from those before it as long as there are such."""
    score, places = score.clone(), places.to(score.device)
    span = score.amax(dim=1, keepdim=True) - score.amin(dim=1, keepdim=True) + 1
    taken = torch.zeros_like(score)
    chosen = []
    for _ in range(min(count, len(places))):
        best = (score - span * taken).argmax(dim=1)
        chosen.append(best)
        place = places[best][:, None]
        close = (2 * (place - places).abs()[..., :2] < place[..., 2:]).all(dim=2)
        close &= (place[..., 2:] == places[:, 2:]).all(dim=2)
        taken = torch.maximum(taken, close.to(taken))
        score = score.scatter(1, best[:, None], -torch.inf)
    return torch.stack(chosen, dim=1)
