"""Where a patch can be and which masks hide it: 𝓡, 𝓜, and the only coordinate arithmetic of the package."""

from __future__ import annotations

from patchproof.geometry._masks import (
    MaskSet,
    PatchThreat,
    Rect,
    Uncovered,
    Unions,
    covering_masks,
    inside,
    parse_patches,
    parse_size,
    size_words,
    square_side,
    whole_size,
)
from patchproof.geometry._native import (
    Placement,
    native_footprint,
    native_threat,
    nearest_sources,
    placement,
    resize_weights,
)
from patchproof.geometry._places import all_places, as_rects, best_places, grid_places, hidden_by, mass_inside

__all__ = [
    "MaskSet",
    "PatchThreat",
    "Placement",
    "Rect",
    "Uncovered",
    "Unions",
    "all_places",
    "as_rects",
    "best_places",
    "covering_masks",
    "grid_places",
    "hidden_by",
    "inside",
    "mass_inside",
    "native_footprint",
    "native_threat",
    "nearest_sources",
    "parse_patches",
    "parse_size",
    "placement",
    "resize_weights",
    "size_words",
    "square_side",
    "whole_size",
]
