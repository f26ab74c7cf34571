"""Threats, masks and footprints against a slow reference, torchvision's crops, and the resizers of Pillow and torch."""

from __future__ import annotations

from itertools import combinations_with_replacement, islice, product
from math import ceil, sqrt

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from PIL import Image
from torch.nn.functional import interpolate
from torchvision import transforms
from torchvision.transforms.v2.functional import center_crop

import reference_geometry as reference
from patchproof.data import preprocess
from patchproof.geometry import (
    MaskSet,
    PatchThreat,
    Rect,
    covering_masks,
    native_footprint,
    native_threat,
    nearest_sources,
    placement,
    resize_weights,
    square_side,
)
from patchproof.types import InputError, Preprocessing

slow = pytest.mark.slow
FILTERS = {"nearest": Image.NEAREST, "bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Run torch on one thread: with thousands of tiny tensors, starting threads would cost more than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def box(rect: Rect) -> reference.Box:
    return rect.top, rect.left, rect.height, rect.width


def boxes(rects) -> list[reference.Box]:
    return [box(rect) for rect in rects]


def threat_of(image: int, patch: int) -> PatchThreat:
    return PatchThreat((image, image), ((patch, patch),))


def sides(limit: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(1, limit), st.integers(1, limit))


@st.composite
def mask_sets(draw, *, side: int, masks: int) -> MaskSet:
    """Arbitrary rectangles in a small image, so that nested and equal ones are common."""
    height, width = draw(sides(side))

    def interval(n: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.integers(0, n - 1).flatmap(lambda start: st.tuples(st.just(start), st.integers(1, n - start)))

    pairs = draw(st.lists(st.tuples(interval(height), interval(width)), min_size=1, max_size=masks))
    return MaskSet((height, width), tuple(Rect(a, b, h, w) for (a, h), (b, w) in pairs))


def patch_sizes_of(image_size: tuple[int, int]) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    size = st.tuples(st.integers(1, image_size[0]), st.integers(1, image_size[1]))
    return st.lists(size, min_size=1, max_size=3, unique=True).map(tuple)


# Rect


def test_contains_is_inclusion_of_pixels():
    rects = [Rect(*b) for b in product(range(2), range(2), range(1, 4), range(1, 4))]
    for a, b in product(rects, repeat=2):
        assert a.contains(b) == (reference.pixels(box(b)) <= reference.pixels(box(a)))


# PatchThreat and square_side


def test_square_side_at_224_is_the_papers():
    assert [square_side(percent, (224, 224)) for percent in (1, 2, 3)] == [23, 32, 39]


@pytest.mark.parametrize("image_size", [(224, 224), (32, 32), (28, 28), (97, 31), (500, 375), (1, 1)])
def test_square_side_is_the_smallest_side_that_holds_the_share(image_size):
    texts = ["0.4", "2.4", "1", "2", "3", "100", "0.01", "1e-05", "12.25", "99.9"] + [
        f"{i / 7:.3f}" for i in range(1, 80)
    ]
    for text in texts:
        assert square_side(float(text), image_size) == reference.square_side(text, image_size), text


def test_a_share_that_was_meant_as_a_fraction_is_remarked_on(notes):
    assert square_side(3, (64, 64)) == 12
    assert square_side(0.1, (64, 64)) == 3
    assert not notes
    assert square_side(0.03, (64, 64)) == 2
    assert notes == ["0.03 percent of the image is a patch of 2×2 pixels; for three percent give 3"]


def test_square_side_is_exact_where_the_product_of_floats_is_not():
    percents = {side: side * side / 2500 for side in range(1, 501)}  # of 500×500 pixels: exactly side² of them
    for naive in (lambda percent: percent / 100 * 500 * 500, lambda percent: percent * 500 * 500 / 100):
        assert any(ceil(sqrt(naive(percent))) != side for side, percent in percents.items())
    assert {side: square_side(percent, (500, 500)) for side, percent in percents.items()} == {s: s for s in percents}


@pytest.mark.parametrize("percent", [0.0, -1.0, 100.5, float("nan"), float("inf")])
def test_square_side_refuses_a_share_outside_0_to_100(percent):
    with pytest.raises(InputError, match="more than 0 and at most 100 percent"):
        square_side(percent, (224, 224))


def test_square_threat_in_percent_is_the_one_in_pixels():
    in_percent = PatchThreat.square(image_size=(224, 224), percent=3)
    assert in_percent == PatchThreat.square(image_size=(224, 224), pixels=39) == threat_of(224, 39)


@pytest.mark.parametrize("given_both_or_none", [{}, {"percent": 3.0, "pixels": 39}])
def test_square_threat_takes_percent_or_pixels(given_both_or_none):
    with pytest.raises(InputError, match="either in percent or in pixels"):
        PatchThreat.square(image_size=(224, 224), **given_both_or_none)


@pytest.mark.parametrize("size", [(9, 3), (3, 6), (0, 1), (1, 0), (-1, 2)])
def test_threat_refuses_a_patch_that_does_not_fit(size):
    with pytest.raises(
        InputError,
        match=f"a {size[0]}×{size[1]} patch does not fit a 8×5 image.* height of 1 to 8 and a width of 1 to 5",
    ):
        PatchThreat((8, 5), ((1, 1), size))


def test_threat_refuses_no_sizes_an_empty_image_and_a_square_that_is_too_large():
    with pytest.raises(InputError, match="names no patch size"):
        PatchThreat((8, 8), ())
    with pytest.raises(InputError, match="image_size must be at least one pixel each way, not 0×8"):
        PatchThreat((0, 8), ((1, 1),))
    with pytest.raises(InputError, match="a 20×20 patch does not fit a 10×40 image"):
        PatchThreat.square(image_size=(10, 40), percent=100.0)


# covering_masks


@pytest.mark.parametrize("image_size", [(7, 7), (10, 6), (5, 9), (1, 8)])
def test_every_position_of_every_patch_is_covered(image_size):
    for size in product(*(range(1, n + 1) for n in image_size)):
        for k in range(1, 11):
            masks = covering_masks(PatchThreat(image_size, (size,)), per_axis=k)
            assert reference.uncovered(image_size, boxes(masks.rects), [size]) == []


@pytest.mark.parametrize("n", [2, 3, 16, 28, 33, 64, 97])
def test_an_axis_is_covered_by_at_most_k_masks_as_the_formula_says(n):
    for p, k in product(range(1, n), range(1, 11)):
        masks = covering_masks(PatchThreat((n, 1), ((p, 1),)), per_axis=(k, 1))
        assert reference.uncovered((n, 1), boxes(masks.rects), [(p, 1)]) == []
        assert len(masks) <= k
        assert list(masks.axes[0]) == reference.axis_masks(n, p, k)


@pytest.mark.parametrize("unit", [2, 3, 4])
def test_aligned_masks_cover_with_edges_between_the_units_and_none_is_larger_than_it_must_be(unit):
    for units, k in product(range(1, 7), range(1, 8)):
        n = units * unit
        for p in range(1, n + 1):
            masks = covering_masks(PatchThreat((n, unit), ((p, 1),)), per_axis=(k, 1), align=(unit, unit))
            assert reference.uncovered((n, unit), boxes(masks.rects), [(p, 1)]) == []
            assert len(masks.axes[0]) <= k
            assert all(edge % unit == 0 for interval in masks.axes[0] for edge in interval)
            touched = max((start + p - 1) // unit - start // unit + 1 for start in range(n - p + 1))
            side = masks.rects[0].height // unit
            assert side == touched or k * (side - 1) - (k - 1) * (touched - 1) < units, "one unit less would not do"
    assert covering_masks(threat_of(224, 39), per_axis=3, align=(16, 16)).axes[0] == ((0, 112), (64, 176), (112, 224))
    with pytest.raises(InputError, match="cannot be aligned to 16 pixels in an image of 28"):
        covering_masks(threat_of(28, 5), per_axis=3, align=(16, 16))


@settings(max_examples=3 * settings().max_examples)
@given(st.data())
def test_rectangles_of_several_sizes_are_covered_with_counts_by_axis(data):
    image_size = data.draw(sides(12))
    threat = PatchThreat(image_size, data.draw(patch_sizes_of(image_size)))
    per_axis = data.draw(sides(5))
    masks = covering_masks(threat, per_axis=per_axis)
    assert reference.uncovered(image_size, boxes(masks.rects), threat.patch_sizes) == []
    assert [len(axis) <= k for axis, k in zip(masks.axes, per_axis, strict=True)] == [True, True]
    expected = [reference.axis_masks(n, p, k) for n, p, k in zip(image_size, threat.largest, per_axis, strict=True)]
    assert [list(axis) for axis in masks.axes] == expected


@pytest.mark.parametrize(
    ("image", "patch", "per_axis", "side", "starts"),
    [
        (224, 39, 3, 100, [0, 62, 124]),
        (224, 39, 6, 69, [0, 31, 62, 93, 124, 155]),
        (224, 32, 3, 96, [0, 65, 128]),
        (224, 32, 6, 64, [0, 33, 66, 99, 132, 160]),
        (224, 23, 3, 90, [0, 68, 134]),
        (224, 23, 6, 56, [0, 34, 68, 102, 136, 168]),
        (224, 35, 3, 98, [0, 64, 126]),
        (224, 35, 6, 66, [0, 32, 64, 96, 128, 158]),
        (224, 14, 3, 84, [0, 71, 140]),
        (224, 14, 6, 49, [0, 36, 72, 108, 144, 175]),
        (28, 5, 3, 12, [0, 8, 16]),
        (28, 5, 6, 8, [0, 4, 8, 12, 16, 20]),
    ],
)
def test_masks_are_those_method_gives(image, patch, per_axis, side, starts):
    masks = covering_masks(threat_of(image, patch), per_axis=per_axis)
    assert boxes(masks.rects) == [(top, left, side, side) for top in starts for left in starts]


@pytest.mark.parametrize("per_axis", [0, -3, (2, 0), (0, 2)])
def test_covering_masks_needs_a_mask_on_each_axis(per_axis):
    with pytest.raises(InputError, match="per_axis must be at least 1, not"):
        covering_masks(threat_of(8, 2), per_axis=per_axis)


# MaskSet


@settings(max_examples=2 * settings().max_examples)
@given(mask_sets(side=6, masks=4))
def test_keep_is_false_exactly_on_the_masks(masks):
    keep = masks.keep()
    assert keep.dtype == torch.bool
    assert keep.shape == (len(masks), 1, *masks.image_size)
    assert keep[:, 0].tolist() == reference.keep(masks.image_size, boxes(masks.rects))


@given(mask_sets(side=4, masks=5))
def test_what_hides_the_whole_image_is_found(masks):
    shown = masks.keep()[:, 0].flatten(1)
    assert masks.hide_all(1) == (not shown.any(dim=1).all())
    assert masks.hide_all(2) == (not all((a & b).any() for a in shown for b in shown))


@pytest.mark.parametrize(
    "rect", [(0, 0, 0, 3), (0, 0, 3, 0), (-1, 0, 3, 3), (0, -1, 3, 3), (4, 0, 5, 3), (0, 3, 2, 3), (2, 2, -1, 1)]
)
def test_mask_set_refuses_masks_that_are_empty_or_leave_the_image(rect):
    with pytest.raises(InputError, match=r"Rect\(.*\) is empty or not inside the 8×5 image"):
        MaskSet((8, 5), (Rect(0, 0, 8, 5), Rect(*rect)))
    with pytest.raises(InputError, match="at least one mask; build one with covering_masks"):
        MaskSet((8, 5), ())


# uncovered


@settings(max_examples=3 * settings().max_examples)
@given(st.data())
def test_uncovered_lists_the_positions_brute_force_finds(data):
    masks = data.draw(mask_sets(side=8, masks=5))
    threat = PatchThreat(masks.image_size, data.draw(patch_sizes_of(masks.image_size)))
    expected = reference.uncovered(masks.image_size, boxes(masks.rects), threat.patch_sizes)
    found = masks.uncovered(threat)
    assert sorted(boxes(found)) == sorted(expected)
    assert (len(found), bool(found)) == (len(expected), bool(expected))


@pytest.mark.parametrize(
    ("image_size", "patch", "per_axis"), [((28, 28), (5, 5), 3), ((12, 9), (3, 2), 4), ((9, 9), (7, 7), 6)]
)
def test_a_covering_set_without_one_of_its_masks_misses_what_brute_force_says(image_size, patch, per_axis):
    threat = PatchThreat(image_size, (patch,))
    masks = covering_masks(threat, per_axis=per_axis)
    assert not masks.uncovered(threat)
    for rect in masks.rects:
        fewer = MaskSet(image_size, tuple(r for r in masks.rects if r != rect))
        missed = reference.uncovered(image_size, boxes(fewer.rects), [patch])
        assert missed
        assert sorted(boxes(fewer.uncovered(threat))) == sorted(missed)


def test_any_number_of_masks_is_checked_without_a_table_of_their_cells():
    """Of 224×224 masks it would have 2.5 billion entries."""
    threat = threat_of(224, 1)
    masks = covering_masks(threat, per_axis=10**9)
    assert len(masks) == 224**2
    assert not masks.uncovered(threat)
    assert not masks.hide_all(2)
    assert [len(axis) for axis in masks.axes] == [224, 224]
    assert "_cells" not in vars(masks)
    with pytest.raises(InputError, match=r"900 masks have 404,550 pairs, too many .* take a smaller per_axis"):
        covering_masks(PatchThreat((224, 224), ((20, 20),), 2), per_axis=30)


# two patches


def parts(masks: MaskSet) -> list[list[reference.Box]]:
    return [boxes(part) for part in masks.parts]


def unordered(pairs) -> list[tuple[reference.Box, ...]]:
    return sorted(tuple(sorted(pair)) for pair in pairs)


@pytest.mark.parametrize("image_size", [(6, 6), (4, 7), (1, 9)])
def test_every_pair_of_positions_is_covered_until_a_union_is_dropped(image_size):
    for size, k in product(product(*(range(1, n + 1) for n in image_size)), (1, 2, 3)):
        threat = PatchThreat(image_size, (size,), patches=2)
        masks = covering_masks(threat, per_axis=k)
        assert reference.uncovered_pairs(image_size, parts(masks), [size]) == list(masks.uncovered(threat)) == []
        fewer = MaskSet(image_size, masks.rects[:-1] or masks.rects)
        missed = reference.uncovered_pairs(image_size, parts(fewer), [size])
        assert unordered(map(boxes, fewer.uncovered(threat))) == unordered(missed)
    threat = PatchThreat.square(image_size=(6, 6), pixels=1, patches=2)
    fewer = MaskSet((6, 6), covering_masks(threat, per_axis=3).rects[:-1])
    assert fewer.uncovered(threat)
    assert not fewer.uncovered(threat_of(6, 1)), "every single position is still covered"


@settings(max_examples=2 * settings().max_examples)
@given(st.data())
def test_uncovered_pairs_of_any_unions_are_those_brute_force_finds(data):
    rects = data.draw(mask_sets(side=6, masks=6))
    chosen = st.lists(st.sampled_from(rects.rects), min_size=1, max_size=3).map(tuple)
    masks = MaskSet(rects.image_size, tuple(data.draw(st.lists(chosen, min_size=1, max_size=6))))
    threat = PatchThreat(masks.image_size, data.draw(patch_sizes_of(masks.image_size)), patches=2)
    found, missed = (
        masks.uncovered(threat),
        reference.uncovered_pairs(masks.image_size, parts(masks), threat.patch_sizes),
    )
    assert len(found) == len(missed)
    assert unordered(map(boxes, found)) == unordered(missed)
    check_unions(masks)


@pytest.mark.parametrize(
    ("patch", "per_axis", "count"), [(39, 2, 15), (39, 3, 255), (39, 4, 2516), (14, 6, 66_711), (39, 6, 63_679)]
)
def test_unions_of_four_are_counted_once(patch, per_axis, count):
    """There are C(n, 1) + … + C(n, 4) unions, or fewer if two masks hide a third one between them."""
    threat = PatchThreat.square(image_size=(224, 224), pixels=patch, patches=2)
    masks = covering_masks(threat, per_axis=per_axis)
    n = per_axis**2
    assert (len(masks), len(masks.unions), len(masks.uncovered(threat))) == (n * (n + 1) // 2, count, 0)
    assert masks.axes == covering_masks(threat_of(224, patch), per_axis=per_axis).axes


def test_uncovered_of_a_huge_image_is_counted_without_a_list():
    n = 100_000
    threat = PatchThreat((n, n), ((17_321, 17_321), (10, 20)))
    masks = covering_masks(threat, per_axis=6)
    assert len(masks) == 36
    assert len(masks.uncovered(threat)) == 0
    half = MaskSet((n, n), (Rect(0, 0, n // 2, n),))
    found = half.uncovered(PatchThreat((n, n), ((10, 20),)))
    assert found
    assert len(found) == n // 2 * (n - 20 + 1)  # tops from n/2 − 9 to n − 10, every left
    assert list(islice(found, 2)) == [Rect(n // 2 - 9, 0, 10, 20), Rect(n // 2 - 9, 1, 10, 20)]


def test_a_patch_size_given_twice_is_one_threat():
    masks = MaskSet((5, 5), (Rect(0, 0, 3, 3),))
    once, twice = PatchThreat((5, 5), ((2, 2),)), PatchThreat((5, 5), ((2, 2), (2, 2)))
    assert len(masks.uncovered(twice)) == len(masks.uncovered(once))
    assert twice == once
    assert twice.words == "one patch of 2×2 pixels"


def test_uncovered_refuses_a_threat_for_another_image_size():
    with pytest.raises(InputError, match=r"masks are for images of \(8, 8\), the threat for \(9, 9\)"):
        covering_masks(threat_of(8, 2), per_axis=2).uncovered(threat_of(9, 2))


# axes and children


def test_masks_off_a_grid_have_no_axes():
    grid = covering_masks(threat_of(8, 2), per_axis=2).rects
    for rects in (grid[:-1], grid[::-1], (*grid, grid[0])):
        with pytest.raises(InputError, match="not a grid of rows and columns"):
            _ = MaskSet((8, 8), rects).axes
        with pytest.raises(InputError, match="not a grid of rows and columns"):
            MaskSet((8, 8), rects).children(grid[0])


def expected_children(fine: MaskSet, parent: Rect) -> list[Rect]:
    rows = sorted({(r.top, r.bottom) for r in fine.rects})
    columns = sorted({(r.left, r.right) for r in fine.rects})
    chosen_rows = [rows[i] for i in reference.fewest_covering((parent.top, parent.bottom), rows)]
    chosen_columns = [columns[j] for j in reference.fewest_covering((parent.left, parent.right), columns)]
    return [Rect(a, c, b - a, d - c) for a, b in chosen_rows for c, d in chosen_columns]


@pytest.mark.parametrize(("coarse", "fine"), [(3, 6), (2, 4), (2, 5), (1, 3), (3, 3)])
@pytest.mark.parametrize("n", [9, 20, 28])
def test_children_are_the_best_of_all_subsets(n, coarse, fine):
    for p, taller in product(range(1, n), (0, 2)):
        large = covering_masks(threat_of(n, p), per_axis=coarse)
        small = covering_masks(PatchThreat((n, n), ((min(p + taller, n), p),)), per_axis=fine)
        for parent in (large.rects[0], large.rects[len(large) // 2], large.rects[-1]):
            assert [small.rects[i] for i in small.children(parent)] == expected_children(small, parent)


@settings(max_examples=5 * settings().max_examples)
@given(
    st.sets(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=6),
    st.integers(0, 9),
    st.integers(1, 6),
)
def test_children_of_any_interval_are_the_best_of_all_subsets_or_an_error(intervals, top, height):
    fine = MaskSet((1, 16), tuple(Rect(0, left, 1, width) for left, width in sorted(intervals)))
    parent = Rect(0, top, 1, height)
    expected = reference.fewest_covering((top, top + height), fine.axes[1])
    if expected is None:
        with pytest.raises(InputError, match=rf"covers \[{top}, {top + height}\); take a finer mask set"):
            fine.children(parent)
    else:
        assert fine.children(parent) == expected


@pytest.mark.parametrize(("image", "remainder"), [(224, 3), (28, 5)])
def test_children_make_up_their_parent_only_for_one_patch_in_six(image, remainder):
    exact = set()
    for p in range(1, image // 2):
        large, small = (covering_masks(PatchThreat((image, 1), ((p, 1),)), per_axis=k) for k in (3, 6))
        unions = [[reference.pixels(box(small.rects[i])) for i in small.children(parent)] for parent in large.rects]
        if all(frozenset().union(*u) == reference.pixels(box(r)) for u, r in zip(unions, large.rects, strict=True)):
            exact.add(p)
    assert exact == {p for p in range(1, image // 2) if p % 6 == remainder}  # at 224: 39, but not 14, 23, 32 or 35


@pytest.mark.parametrize(("image", "patch"), [(224, 39), (28, 5)])
def test_exact_children_are_the_four_at_2i_and_2i_plus_1(image, patch):
    large, small = (covering_masks(threat_of(image, patch), per_axis=k) for k in (3, 6))
    for index, parent in enumerate(large.rects):
        i, j = divmod(index, 3)
        assert small.children(parent) == tuple(6 * a + b for a in (2 * i, 2 * i + 1) for b in (2 * j, 2 * j + 1))
        union = frozenset().union(*(reference.pixels(box(small.rects[c])) for c in small.children(parent)))
        assert union == reference.pixels(box(parent))


# unions


def union_of(masks: MaskSet, a: int, b: int) -> reference.Pixels:
    return frozenset().union(*(reference.pixels(box(rect)) for rect in (*masks.parts[a], *masks.parts[b])))


def check_unions(masks: MaskSet) -> None:
    """Every distinct set of pixels has one number, every number has one set, and single masks come first."""
    unions, of_pair = masks.unions, masks.unions.of_pair.tolist()
    pairs = list(product(range(len(masks)), repeat=2))
    pixel_sets = {(a, b): union_of(masks, a, b) for a, b in pairs}
    numbers = {pixel_sets[a, b]: of_pair[a][b] for a, b in pairs}
    assert all(of_pair[a][b] == numbers[pixel_sets[a, b]] for a, b in pairs)
    assert sorted(numbers.values()) == list(range(len(unions)))
    named = list(zip(unions.first.tolist(), unions.second.tolist(), strict=True))
    assert [numbers[pixel_sets[pair]] for pair in named] == list(range(len(unions)))
    singles = {of_pair[a][a] for a in range(len(masks))}
    assert singles == set(range(len(singles)))
    assert all(a == b for a, b in named[: len(singles)])


@settings(max_examples=2 * settings().max_examples)
@given(mask_sets(side=5, masks=6))
def test_unions_number_the_distinct_sets_of_pixels(masks):
    check_unions(masks)


@pytest.mark.parametrize("per_axis", [3, 6])
def test_unions_of_a_grid_are_its_distinct_sets_of_pixels(per_axis):
    check_unions(covering_masks(threat_of(28, 5), per_axis=per_axis))


@pytest.mark.parametrize("patch", [39, 32, 23, 35, 14])
@pytest.mark.parametrize(("per_axis", "count"), [(3, 45), (6, 666)])
def test_grids_at_224_have_a_union_for_every_unordered_pair(patch, per_axis, count):
    unions = covering_masks(threat_of(224, patch), per_axis=per_axis).unions
    assert len(unions) == len(list(combinations_with_replacement(range(per_axis**2), 2))) == count
    assert torch.equal(unions.of_pair, unions.of_pair.T)
    assert unions.of_pair.dtype == unions.first.dtype == unions.second.dtype == torch.int64


# placement


@pytest.mark.parametrize("resize", [1, 3, 7, 16, 23, 64, 232, 256])
def test_resize_to_a_shorter_side_gives_torchvisions_sizes(resize):
    photographs = [(375, 500), (500, 333), (213, 160), (281, 500)]
    for height, width in [*product((1, 2, 5, 7, 13, 16, 28, 33, 40), repeat=2), *photographs]:
        width_out, height_out = transforms.Resize(resize)(Image.new("L", (width, height))).size
        assert placement(Preprocessing(resize), (height, width)).resized == (height_out, width_out)


def test_crop_is_cut_where_torchvision_cuts_it():
    for height, width in product((5, 6, 7, 8, 13, 30), repeat=2):
        ramp = torch.arange(height * width).reshape(1, height, width)  # a pixel's value tells its place
        for crop in product(range(1, height + 1), range(1, width + 1)):
            place = placement(Preprocessing(None, crop=crop), (height, width))
            cut = center_crop(ramp, list(crop))[0]
            assert (place.top, place.left) == divmod(int(cut[0, 0]), width)
            assert torch.equal(ramp[0, place.top : place.top + crop[0], place.left : place.left + crop[1]], cut)


def test_an_exact_resize_and_no_resize_are_taken_as_they_are():
    assert placement(Preprocessing((8, 20)), (5, 7)) == ((8, 20), 0, 0, (8, 20))
    assert placement(Preprocessing(None), (5, 7)) == ((5, 7), 0, 0, (5, 7))


@pytest.mark.parametrize(("native", "resized"), [((30, 50), (44, 73)), ((50, 30), (116, 70)), ((40, 60), (46, 70))])
def test_covering_is_resizing_to_the_size_that_covers(native, resized):
    """The image keeps its aspect, and the footprint of a patch follows."""
    covering = Preprocessing((44, 70), (38, 61), cover=True)
    exact = Preprocessing(resized, (38, 61))
    assert placement(covering, native) == placement(exact, native)
    threats = [native_threat(native_size=native, patch_sizes=((3, 5),), preprocessing=p) for p in (covering, exact)]
    assert threats[0] == threats[1]


@pytest.mark.parametrize("crop", [(9, 4), (4, 9)])
def test_placement_refuses_a_crop_larger_than_the_image(crop):
    with pytest.raises(InputError, match=r"the crop .* is larger than the image \(8, 8\).* resize to at least 9"):
        placement(Preprocessing(8, crop=crop), (5, 5))


# The resize tables


def axis_pairs() -> list[tuple[int, int]]:
    return [*product(range(1, 18), range(1, 41)), (32, 224), (64, 224), (256, 224), (28, 224), (100, 33)]


def test_nearest_copies_the_pixel_under_the_centre():
    for n, r in axis_pairs():
        assert nearest_sources(n, r).tolist() == [reference.nearest_source(x, n, r) for x in range(r)]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_weights_are_the_kernels_and_zero_exactly_where_it_is(interpolation):
    for n, r in axis_pairs()[::-9]:
        weights, expected = resize_weights(n, r, interpolation), reference.resize_weights(n, r, interpolation)
        assert np.array_equal(weights != 0, np.array(expected) != 0)
        assert np.allclose(weights, np.array(expected, dtype=float), rtol=0, atol=1e-12)


# Native threats: the input pixels that a patch on the native image really changes.
#
# Pillow in mode F and torch in float64 have float64 weights. A weight that should be zero is about 1e-14 there, the
# smallest true weight at these sizes is 1e-5, and a pixel counts as changed from 1e-6 on. Nearest has no such gap: at a
# tie Pillow copies either pixel, because it adds up its steps in floats. `preprocess` takes the exact one, so ties of
# nearest are measured through it in 8 bits, where every copy of a changed pixel shows.

CHANGE = 1000.0
KERNELS = [("nearest", True), ("bilinear", True), ("bicubic", True), ("bilinear", False), ("bicubic", False)]

ROUTES = [  # native size, resize, the size that gives, crop
    ((5, 5), (15, 15), (15, 15), None),
    ((5, 7), (12, 40), (12, 40), None),
    ((6, 9), (17, 5), (17, 5), None),
    ((17, 7), (3, 4), (3, 4), None),
    ((16, 6), (8, 2), (8, 2), None),
    ((6, 15), (4, 10), (4, 10), None),
    ((6, 8), (6, 8), (6, 8), None),
    ((6, 8), (6, 24), (6, 24), None),
    ((1, 5), (4, 1), (4, 1), None),
    ((4, 16), (14, 28), (14, 28), None),  # ties of nearest that Pillow gives to the other pixel
    ((5, 9), 14, (14, 25), (9, 12)),
    ((11, 7), 5, (7, 5), (4, 2)),
    ((7, 10), 4, (4, 5), (3, 3)),
    ((8, 8), None, (8, 8), (3, 5)),
]


def resize_floats(images: np.ndarray, size: tuple[int, int], preprocessing: Preprocessing) -> np.ndarray:
    """b h w through Pillow in mode F or torch in float64, cut by torchvision."""
    mode = preprocessing.interpolation
    if preprocessing.antialias:
        pictures = [Image.fromarray(image.astype(np.float32)).resize(size[::-1], FILTERS[mode]) for image in images]
        resized = torch.from_numpy(np.stack([np.asarray(picture) for picture in pictures]))
    else:
        batch = torch.from_numpy(images)[:, None]
        resized = interpolate(batch, size, mode=mode, align_corners=False, antialias=False)[:, 0]
    return center_crop(resized, list(preprocessing.crop or size)).numpy()


def measured_hulls(native, size, patch_size, preprocessing) -> dict[reference.Box, reference.Box | None]:
    """For each position, the hull of the input pixels that change with the patch's pixels, alone or together."""
    rng = np.random.default_rng(0)
    image = rng.random(native)
    before = resize_floats(image[None], size, preprocessing)
    alone = image + CHANGE * np.eye(native[0] * native[1]).reshape(-1, *native)
    moved_alone = abs(resize_floats(alone, size, preprocessing) - before) > 1e-6 * CHANGE
    moved_alone = moved_alone.reshape(*native, *before.shape[1:])
    hulls = {}
    for top, left, height, width in reference.positions(native, patch_size):
        where = slice(top, top + height), slice(left, left + width)
        together = image.copy()
        together[where] += rng.choice([-1, 1], patch_size) * rng.uniform(CHANGE / 2, CHANGE, patch_size)
        moved = abs(resize_floats(together[None], size, preprocessing) - before)[0] > 1e-6 * CHANGE
        moved |= moved_alone[where].any(axis=(0, 1))
        hulls[top, left, height, width] = reference.hull(np.argwhere(moved).tolist())
    return hulls


def predicted_hulls(native, patch_size, preprocessing) -> dict[reference.Box, reference.Box | None]:
    footprints = {p: native_footprint(Rect(*p), native, preprocessing) for p in reference.positions(native, patch_size)}
    return {patch: None if footprint is None else box(footprint) for patch, footprint in footprints.items()}


def patch_sizes_for(native: tuple[int, int]) -> set[tuple[int, int]]:
    return {(min(h, native[0]), min(w, native[1])) for h, w in ((1, 1), (2, 3), (5, 4), native)}


def has_tie(native, size, kernel) -> bool:
    return kernel[0] == "nearest" and any(reference.has_tie(n, r) for n, r in zip(native, size, strict=True))


def largest(hulls) -> tuple[int, int]:
    found = [hull for hull in hulls if hull is not None]
    return max(height for *_, height, _ in found), max(width for *_, width in found)


def half(cases) -> list:
    """Mark every second case as slow. A route has five kernels, so each kernel stays fast for some routes."""
    return [case if number % 2 == 0 else pytest.param(*case, marks=slow) for number, case in enumerate(cases)]


UNTIED = [(*route, *kernel) for route, kernel in product(ROUTES, KERNELS) if not has_tie(route[0], route[2], kernel)]


@pytest.mark.parametrize(("native", "resize", "size", "crop", "interpolation", "antialias"), half(UNTIED))
def test_footprint_is_the_hull_of_what_moves(native, resize, size, crop, interpolation, antialias):
    preprocessing = Preprocessing(resize, crop, interpolation, antialias)
    for patch_size in patch_sizes_for(native):
        measured = measured_hulls(native, size, patch_size, preprocessing)
        assert predicted_hulls(native, patch_size, preprocessing) == measured
        threat = native_threat(native_size=native, patch_sizes=(patch_size,), preprocessing=preprocessing)
        assert threat == PatchThreat(crop or size, (largest(measured.values()),))


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=slow)])
@pytest.mark.parametrize("kernel", [*KERNELS[::2], *(pytest.param(k, marks=slow) for k in KERNELS[1::2])])
def test_footprint_of_a_pixel_is_exact_at_every_ratio(kernel, step):
    pairs = [(n, r) for n, r in product(range(1, 18), range(1, 41)) if not has_tie((n,), (r,), kernel)]
    assert len(pairs) > 300
    for n, r in pairs[::step]:
        preprocessing = Preprocessing((1, r), None, *kernel)
        moved = abs(resize_floats(np.eye(n)[:, None], (1, r), preprocessing)) > 1e-6
        measured = [reference.hull(np.argwhere(m).tolist()) for m in moved]
        assert list(predicted_hulls((1, n), (1, 1), preprocessing).values()) == measured, (n, r)


def moved_in_8_bits(patch, native, preprocessing, *, pictures: int) -> reference.Box | None:
    """The hull of the input pixels that random black-and-white patches change on random pictures."""
    rng = np.random.default_rng(patch)
    top, left, height, width = patch
    moved = np.zeros(placement(preprocessing, native).size, dtype=bool)
    for _ in range(pictures):
        before = rng.integers(1, 255, (*native, 3), dtype=np.uint8)
        after = before.copy()
        black_or_white = 255 * rng.integers(0, 2, (height, width, 3), dtype=np.uint8)
        after[top : top + height, left : left + width] = black_or_white
        images = [preprocess(Image.fromarray(pixels), preprocessing) for pixels in (before, after)]
        moved |= (images[0] != images[1]).any(dim=0).numpy()
    return reference.hull(np.argwhere(moved).tolist())


@pytest.mark.parametrize(
    ("native", "resize", "crop", "interpolation", "antialias"),
    half([(native, resize, crop, *kernel) for (native, resize, _, crop), kernel in product(ROUTES, KERNELS)]),
)
def test_8_bit_pictures_move_nowhere_else(native, resize, crop, interpolation, antialias):
    preprocessing = Preprocessing(resize, crop, interpolation, antialias)
    for patch, predicted in predicted_hulls(native, (min(2, native[0]), 2), preprocessing).items():
        moved = moved_in_8_bits(patch, native, preprocessing, pictures=1)
        if interpolation == "nearest":
            assert moved == predicted
        else:
            assert moved is None or reference.hides(predicted, moved)


@pytest.mark.parametrize("kernel", KERNELS)
def test_8_bit_pictures_move_nowhere_else_where_a_rounding_would_show(kernel):
    """32 → 224 has pixels on the kernels' edge; 4 → 8 has half levels, which the smallest weight would change."""
    preprocessing = Preprocessing((8, 224), None, *kernel)
    for left in range(32):
        footprint = native_footprint(Rect(1, left, 1, 1), (4, 32), preprocessing)
        moved = moved_in_8_bits((1, left, 1, 1), (4, 32), preprocessing, pictures=12)
        assert reference.hides(box(footprint), moved)


@pytest.mark.parametrize(
    ("interpolation", "five", "two"), [("bicubic", 55, 34), ("bilinear", 41, 20), ("nearest", 35, 14)]
)
def test_native_patches_of_cifar_touch_what_method_says(interpolation, five, two):
    preprocessing = Preprocessing((224, 224), None, interpolation)
    threat = native_threat(native_size=(32, 32), patch_sizes=((5, 5), (2, 2), (5, 2)), preprocessing=preprocessing)
    assert threat == PatchThreat((224, 224), ((five, five), (two, two), (five, two)))


def test_a_patch_that_no_input_pixel_reads_has_no_footprint():
    assert native_footprint(Rect(0, 0, 2, 8), (8, 8), Preprocessing(None, (3, 5))) is None  # rows 2, 3, 4 are kept
    halved = Preprocessing((4, 4), None, "nearest")  # reads the odd rows and columns
    assert native_footprint(Rect(2, 0, 1, 8), (8, 8), halved) is None
    assert native_footprint(Rect(2, 0, 2, 8), (8, 8), halved) == Rect(1, 0, 1, 4)


def test_a_patch_that_leaves_the_native_image_is_refused():
    with pytest.raises(InputError, match="a 33×5 patch does not fit a 32×32 image"):
        native_threat(native_size=(32, 32), patch_sizes=((33, 5),), preprocessing=Preprocessing((224, 224)))
    for patch in ((-2, 0, 5, 5), (30, 0, 5, 5), (0, 40, 5, 5)):
        with pytest.raises(InputError, match="is not inside the image of 32×32"):
            native_footprint(Rect(*patch), (32, 32), Preprocessing((224, 224)))
