"""Locations of a patch as rows (top, left, height, width) of a tensor, to rank tens of thousands at once.

A location of two patches is a pair of such rows, "2 4".
"""

from __future__ import annotations

import math
from itertools import product

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry._threat import PatchThreat, Rect, Rects
from patchproof.types import InputError

MOST_PAIRS = 1 << 22
"""Most pairs of locations that are listed at once: about 300 MB."""


def as_rects(places: Int64[Tensor, "p *k 4"]) -> tuple[Rects, ...]:
    """The locations as rectangles, or as tuples of rectangles if there are two patches."""
    if places.ndim == 2:
        return tuple(Rect(*row) for row in places.tolist())
    return tuple(tuple(Rect(*row) for row in rows) for rows in places.tolist())


def as_places(*shapes: Rects) -> Int64[Tensor, "p *k 4"]:
    """The inverse of `as_rects`."""
    return torch.tensor(shapes)


def every_pair(places: Int64[Tensor, "p 4"]) -> Int64[Tensor, "q 2 4"]:
    """All unordered pairs of different locations; a single location is paired with itself."""
    count = len(places)
    if math.comb(count, 2) > MOST_PAIRS:
        raise InputError(
            f"two patches have {math.comb(count, 2):,} pairs of places, too many to try them all; take "
            "place_search `gradient` or `grid`"
        )
    return places[torch.combinations(torch.arange(count), with_replacement=count == 1)]


def all_places(threat: PatchThreat) -> Int64[Tensor, "p 4"]:
    """Every location of one patch of 𝓡, size by size and row by row."""
    (height, width), sizes = threat.image_size, threat.patch_sizes
    return torch.tensor([(*at, h, w) for h, w in sizes for at in product(range(height - h + 1), range(width - w + 1))])


def grid_places(threat: PatchThreat, count: int) -> Int64[Tensor, "p *k 4"]:
    """At most `count` locations (or pairs), spread evenly over a k × k grid per patch size, k just large enough."""
    (height, width), sizes = threat.image_size, threat.patch_sizes
    singles = count if threat.patches == 1 else 1 + math.ceil(math.sqrt(2 * count))
    k = math.ceil(math.sqrt(singles / len(sizes)))

    def middles(span: int) -> list[int]:
        """The middles of k equal parts of [0, span]."""
        return sorted({(2 * i + 1) * span // (2 * k) for i in range(k)})

    grid = torch.tensor([(*at, h, w) for h, w in sizes for at in product(middles(height - h), middles(width - w))])
    if threat.patches == 2:
        grid = every_pair(grid)
    return grid[[i * len(grid) // count for i in range(count)]] if len(grid) > count else grid


def mass_inside(maps: Float[Tensor, "b h w"], places: Int64[Tensor, "p *k 4"]) -> Float[Tensor, "b p"]:
    """The sum of each map over the pixels of each location; a pixel that two patches share counts twice."""
    integral = torch.nn.functional.pad(maps.cumsum(dim=1).cumsum(dim=2), (1, 0, 1, 0))
    top, left, height, width = places.to(maps.device).unbind(dim=-1)
    bottom, right = top + height, left + width
    mass = integral[:, bottom, right] - integral[:, top, right] - integral[:, bottom, left] + integral[:, top, left]
    return mass if places.ndim == 2 else mass.sum(dim=2)


def hidden_by(places: Int64[Tensor, "p *k 4"], keep: Bool[Tensor, "n 1 h w"]) -> Bool[Tensor, "p n"]:
    """True where a mask hides a location entirely."""
    return mass_inside(keep[:, 0].float(), places).T == 0  # pixels are counted in whole numbers below 2²⁴: exact


def best_places(score: Float[Tensor, "b p"], places: Int64[Tensor, "p 4"], count: int) -> Int64[Tensor, "b count"]:
    """The locations of highest score, at least half a patch apart as long as there are such locations left."""
    score, places = score.clone(), places.to(score.device)
    span = score.amax(dim=1, keepdim=True) - score.amin(dim=1, keepdim=True) + 1
    taken = torch.zeros_like(score)
    chosen = []
    for _ in range(min(count, len(places))):
        best = (score - span * taken).argmax(dim=1)
        chosen.append(best)
        place = places[best][:, None]
        close = (2 * (place - places).abs()[..., :2] < place[..., 2:]).all(dim=2)
        same_size = (place[..., 2:] == places[:, 2:]).all(dim=2)
        taken = torch.maximum(taken, (close & same_size).to(taken))
        score = score.scatter(1, best[:, None], -torch.inf)
    return torch.stack(chosen, dim=1)


def best_pairs(score: Float[Tensor, "b p"], places: Int64[Tensor, "p 4"], count: int) -> Int64[Tensor, "b q 2"]:
    """All pairs of the 2·count best locations, best first: disjoint pairs by their sum, then overlapping ones."""
    best = best_places(score, places, 2 * count)
    number = torch.arange(best.shape[1], device=best.device)
    pairs = best[:, torch.combinations(number, with_replacement=len(number) == 1)]
    start, size = places[pairs].split(2, dim=3)
    overlap = ((start < (start + size).flip(2)) & (start.flip(2) < start + size)).all(dim=3).any(dim=2)
    both = score.gather(1, pairs.flatten(1)).unflatten(1, pairs.shape[1:]).sum(dim=2)
    order = (both - (both.amax() - both.amin() + 1) * overlap).argsort(dim=1, descending=True, stable=True)
    return pairs.gather(1, order[:, :, None].expand_as(pairs))
