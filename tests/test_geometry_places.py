"""Locations of a patch as rows of a tensor, against loops over rectangles."""

from __future__ import annotations

import pytest
import torch

import patchproof as pp
import reference
from patchproof.geometry import all_places, as_rects, best_places, grid_places, hidden_by, inside, mass_inside

THREAT = pp.PatchThreat((8, 10), ((3, 2), (2, 4)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 1000])
def test_a_grid_has_at_most_so_many_different_places_of_every_size_it_has_room_for(count):
    every = [r for size in THREAT.patch_sizes for r in reference.all_patches(THREAT.image_size, size)]
    assert list(as_rects(all_places(THREAT))) == every
    found = as_rects(grid_places(THREAT, count))
    assert len(set(found)) == len(found) <= count
    assert set(found) <= set(every)
    assert len(found) >= min(count, 9)
    if count > 1:
        assert {(r.height, r.width) for r in found} == set(THREAT.patch_sizes)


def test_gradient_mass_and_hiding_equal_loops(generator):
    maps = torch.rand(3, 8, 10, generator=generator, dtype=torch.float64)
    places, masks = all_places(THREAT), pp.covering_masks(THREAT, per_axis=3)
    mass, hides, pixels = mass_inside(maps, places), hidden_by(places, masks.keep()), inside(places, THREAT.image_size)
    for p, r in enumerate(as_rects(places)):
        assert torch.allclose(mass[:, p], maps[:, r.top : r.bottom, r.left : r.right].sum(dim=(1, 2)))
        assert hides[p].tolist() == [mask.contains(r) for mask in masks.rects]
        assert torch.equal(pixels[p], reference.hide(torch.zeros(1, 8, 10), [r], [1.0]) > 0)


def reference_best(score: list[float], places: list[pp.Rect], count: int) -> list[int]:
    """One by one: the best place that is not close to a chosen one; when all are, the best of those left."""

    def close(a, b):
        same = (a.height, a.width) == (b.height, b.width)
        return same and 2 * abs(a.top - b.top) < a.height and 2 * abs(a.left - b.left) < a.width

    chosen: list[int] = []
    while len(chosen) < min(count, len(places)):
        left = [p for p in range(len(places)) if p not in chosen]
        free = [p for p in left if not any(close(places[c], places[p]) for c in chosen)]
        chosen.append(max(free or left, key=lambda p: (score[p], -p)))
    return chosen


@pytest.mark.parametrize("count", [1, 5, 40, 500])
def test_the_best_places_keep_their_distance_while_there_is_room(generator, count):
    places = all_places(pp.PatchThreat((7, 6), ((3, 3), (2, 4))))
    score = torch.randint(0, 6, (4, len(places)), generator=generator).double()
    found = best_places(score, places, count)
    for row in range(4):
        assert found[row].tolist() == reference_best(score[row].tolist(), list(as_rects(places)), count)
