"""The cells that a patch touches, by arithmetic and pixel by pixel."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import patchproof as pp
from patchproof.geometry import Fields
from patchproof.types import InputError


def reference_windows(fields: Fields, threat: pp.PatchThreat, nested: bool) -> set[frozenset[int]]:
    """The sets A(p), pixel by pixel; only the maximal ones unless `nested`."""
    keep = fields.keep()[:, 0]
    height, width = threat.image_size
    found = {
        size: {
            frozenset(torch.nonzero(keep[:, t : t + size[0], q : q + size[1]].flatten(1).any(dim=1))[:, 0].tolist())
            for t, q in product(range(height - size[0] + 1), range(width - size[1] + 1))
        }
        for size in threat.patch_sizes
    }
    return {one for sets in found.values() for one in sets if nested or not any(one < other for other in sets)}


@given(
    st.tuples(st.integers(4, 9), st.integers(4, 9)),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=2, unique=True),
    st.one_of(
        st.tuples(st.sampled_from(["column", "row", "block"]), st.integers(1, 4), st.integers(1, 4)),
        st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(-2, 1)),
    ),
    st.booleans(),
)
def test_windows_are_the_cells_that_share_a_pixel_with_the_patch(image_size, patches, what, nested):
    threat = pp.PatchThreat(image_size, tuple(patches))
    banded = isinstance(what[0], str)
    fields = Fields.bands(image_size, *what) if banded else Fields.receptive(image_size, (3, 2), what)
    windows = fields.touched_by(threat, nested=nested)
    found = [frozenset(torch.nonzero(row)[:, 0].tolist()) for row in windows.touched]
    assert set(found) == reference_windows(fields, threat, nested)
    largest = {frozenset(torch.nonzero(row)[:, 0].tolist()) for row in windows.maximal.touched}
    assert largest == {one for one in found if not any(one < other for other in found)}
    for cells, (top, left, height, width) in zip(found, windows.places.tolist(), strict=True):
        seen = fields.keep()[:, 0, top : top + height, left : left + width].flatten(1).any(dim=1)
        assert frozenset(torch.nonzero(seen)[:, 0].tolist()) == cells
    values = torch.rand(2, len(fields), dtype=torch.float64)
    assert torch.allclose(
        values @ windows.touched.to(values).T + windows.outside(values), values.sum(dim=1, keepdim=True)
    )
    if banded and what[2] == 1:  # the papers' count: w + b − 1, on each ablated axis
        reach = [min(n, size + what[1] - 1) for n, size in zip(image_size, threat.largest, strict=True)]
        cut = {"column": reach[1], "row": reach[0], "block": reach[0] * reach[1]}[what[0]]
        assert int(windows.sizes.max()) <= cut
        if len(patches) == 1:
            assert int(windows.sizes.max()) == cut


def test_the_published_count_of_smoothed_vit_is_one_too_small_at_the_left_edge():
    threat = pp.PatchThreat.square(image_size=(224, 224), pixels=32)
    windows = Fields.bands((224, 224), "column", 19, 10).touched_by(threat)
    assert int(windows.sizes.max()) == 6 == -(-(32 + 19 - 1) // 10) + 1


@pytest.mark.parametrize(("band", "stride", "message"), [(33, 1, "band must be"), (4, 0, "stride must be")])
def test_bands_that_do_not_fit_are_refused(band, stride, message):
    with pytest.raises(InputError, match=message):
        Fields.bands((32, 32), "column", band, stride)
