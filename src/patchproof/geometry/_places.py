"""Places of a patch as rows (top, left, height, width) of one tensor, so that tens of thousands are ranked at once.

A place of two patches is a pair of such rows, "2 4".
"""

from __future__ import annotations

import math
from itertools import product

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry._masks import PatchThreat, Rect, Rects
from patchproof.types import InputError

MOST_PAIRS = 1 << 22
"""Pairs of places that are listed at once: some 300 MB."""


def as_rects(places: Int64[Tensor, "p *k 4"]) -> tuple[Rects, ...]:
    if places.ndim == 2:
        return tuple(Rect(*row) for row in places.tolist())
    return tuple(tuple(Rect(*row) for row in rows) for rows in places.tolist())


def as_places(*shapes: Rects) -> Int64[Tensor, "p *k 4"]:
    """The opposite of `as_rects`."""
    return torch.tensor(shapes)


def every_pair(places: Int64[Tensor, "p 4"]) -> Int64[Tensor, "q 2 4"]:
    """Two different places each; one alone is its own pair."""
    count = len(places)
    if count * (count - 1) // 2 > MOST_PAIRS:
        raise InputError(
            f"two patches have {count * (count - 1) // 2:,} pairs of places, too many to try them all; take "
            "place_search `gradient` or `grid`"
        )
    return torch.stack([places[row] for row in torch.triu_indices(count, count, offset=int(count > 1))], dim=1)


def all_places(threat: PatchThreat) -> Int64[Tensor, "p 4"]:
    """Every place of one patch of 𝓡, size by size and row by row."""
    (height, width), sizes = threat.image_size, threat.patch_sizes
    return torch.tensor([(*at, h, w) for h, w in sizes for at in product(range(height - h + 1), range(width - w + 1))])


def grid_places(threat: PatchThreat, count: int) -> Int64[Tensor, "p *k 4"]:
    """At most `count` places, evenly taken from a k × k grid for each patch size, k as small as gives so many; of two
    patches, pairs of them."""
    (height, width), sizes = threat.image_size, threat.patch_sizes
    singles = count if threat.patches == 1 else 1 + math.ceil(math.sqrt(2 * count))
    k = math.ceil(math.sqrt(singles / len(sizes)))

    def middles(span: int) -> list[int]:
        """Of k equal parts of [0, span]."""
        return sorted({(2 * i + 1) * span // (2 * k) for i in range(k)})

    grid = torch.tensor([(*at, h, w) for h, w in sizes for at in product(middles(height - h), middles(width - w))])
    grid = grid if threat.patches == 1 else every_pair(grid)
    return grid[[i * len(grid) // count for i in range(count)]] if len(grid) > count else grid


def mass_inside(maps: Float[Tensor, "b h w"], places: Int64[Tensor, "p *k 4"]) -> Float[Tensor, "b p"]:
    """The sum of each map over the pixels of each place, from one integral image per map; pixels that two patches share
    count twice."""
    integral = torch.nn.functional.pad(maps.cumsum(dim=1).cumsum(dim=2), (1, 0, 1, 0))
    top, left, height, width = places.to(maps.device).unbind(dim=-1)
    bottom, right = top + height, left + width
    mass = integral[:, bottom, right] - integral[:, top, right] - integral[:, bottom, left] + integral[:, top, left]
    return mass if places.ndim == 2 else mass.sum(dim=2)


def hidden_by(places: Int64[Tensor, "p *k 4"], keep: Bool[Tensor, "n 1 h w"]) -> Bool[Tensor, "p n"]:
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


def best_pairs(score: Float[Tensor, "b p"], places: Int64[Tensor, "p 4"], count: int) -> Int64[Tensor, "b q 2"]:
    """Pairs of the best places, enough of them that `count` can be chosen: those that do not overlap first, then those
    of highest sum."""
    best = best_places(score, places, 2 * count)
    number = torch.arange(best.shape[1], device=best.device)
    pairs = best[:, torch.combinations(number, 2, with_replacement=len(number) == 1)]
    start, size = places[pairs].split(2, dim=3)
    overlap = ((start < (start + size).flip(2)) & (start.flip(2) < start + size)).all(dim=3).any(dim=2)
    both = score.gather(1, pairs.flatten(1)).unflatten(1, pairs.shape[1:]).sum(dim=2)
    order = (both - (both.amax() - both.amin() + 1) * overlap).argsort(dim=1, descending=True, stable=True)
    return pairs.gather(1, order[:, :, None].expand_as(pairs))
