"""Where a patch can be and which masks hide it: 𝓡, 𝓜, and the only coordinate arithmetic of the package."""

from __future__ import annotations

from patchproof.geometry._fields import Fields, Windows, receptive_windows
from patchproof.geometry._masks import (
    MaskSet,
    PatchThreat,
    Rect,
    Rects,
    covering_masks,
    inside,
    parse_patches,
    parse_size,
    rects_of,
    size_words,
    square_side,
    whole_size,
)
from patchproof.geometry._native import (
    native_footprint,
    native_threat,
    nearest_sources,
    placement,
    resize_weights,
)
from patchproof.geometry._places import (
    all_places,
    as_places,
    as_rects,
    best_pairs,
    best_places,
    every_pair,
    grid_places,
    hidden_by,
    mass_inside,
)

__all__ = [
    "Fields",
    "MaskSet",
    "PatchThreat",
    "Rect",
    "Rects",
    "Windows",
    "all_places",
    "as_places",
    "as_rects",
    "best_pairs",
    "best_places",
    "covering_masks",
    "every_pair",
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
    "receptive_windows",
    "rects_of",
    "resize_weights",
    "size_words",
    "square_side",
    "whole_size",
]
