"""Locations of a patch as rows of a tensor, against loops over rectangles."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

import patchproof as pp
import reference
from patchproof.geometry import (
    all_places,
    as_places,
    as_rects,
    best_pairs,
    best_places,
    every_pair,
    grid_places,
    hidden_by,
    inside,
    mass_inside,
)
from patchproof.types import InputError

THREAT = pp.PatchThreat((8, 10), ((3, 2), (2, 4)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 1000])
def test_a_grid_has_at_most_count_different_locations_of_every_patch_size(count):
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
    """One by one: the best location that is not close to a chosen one; if all are close, the best that is left."""

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


def test_places_of_two_patches_equal_loops_over_pairs(generator):
    threat = pp.PatchThreat((8, 10), ((3, 2), (2, 4)), patches=2)
    singles, masks = all_places(threat)[::7], pp.covering_masks(threat, per_axis=2)
    pairs, maps = every_pair(singles), torch.rand(3, 8, 10, generator=generator, dtype=torch.float64)
    rects = as_rects(pairs)
    assert list(rects) == list(combinations(as_rects(singles), 2))
    assert torch.equal(as_places(*rects), pairs)
    mass, hides, pixels = mass_inside(maps, pairs), hidden_by(pairs, masks.keep()), inside(pairs, threat.image_size)
    for p, pair in enumerate(rects):
        assert torch.allclose(
            mass[:, p], sum(maps[:, r.top : r.bottom, r.left : r.right].sum(dim=(1, 2)) for r in pair)
        )
        within = reference.hide(torch.zeros(1, 8, 10), pair, [1.0]) > 0
        assert torch.equal(pixels[p], within)
        assert hides[p].tolist() == [not (within & keep).any() for keep in masks.keep()]
    with pytest.raises(InputError, match="too many to try them all; take place_search"):
        every_pair(torch.zeros(3000, 4, dtype=torch.int64))
    assert len(every_pair(singles[:1])) == 1, "a patch that fits in one place only"


@pytest.mark.parametrize("count", [1, 3, 12])
def test_the_best_pairs_are_disjoint_ones_by_sum_then_overlapping_ones(generator, count):
    threat = pp.PatchThreat((9, 9), ((3, 3),), patches=2)
    assert len(grid_places(threat, count)) == count
    places, score = all_places(threat), torch.rand(4, 49, generator=generator)
    found, rects = best_pairs(score, places, count), as_rects(places)
    for row, pairs in enumerate(found.tolist()):
        best = best_places(score, places, 2 * count)[row].tolist()

        def rank(pair, row=row):
            a, b = (rects[place] for place in pair)
            overlap = abs(a.top - b.top) < 3 and abs(a.left - b.left) < 3
            return overlap, -float(score[row, pair[0]] + score[row, pair[1]])

        assert sorted(map(sorted, pairs)) == sorted(sorted(pair) for pair in combinations(best, 2))
        assert [rank(pair) for pair in pairs] == sorted(rank(pair) for pair in pairs)
