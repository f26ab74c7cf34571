"""Where a patch can be and which masks hide it: 𝓡, 𝓜, and the only coordinate arithmetic of the package."""

from __future__ import annotations

from patchproof.geometry._masks import (
    Interval,
    MaskSet,
    PatchThreat,
    Rect,
    Uncovered,
    Unions,
    covering_masks,
    square_side,
)
from patchproof.geometry._native import (
    Placement,
    native_footprint,
    native_threat,
    nearest_sources,
    placement,
    resize_weights,
)

__all__ = [
    "Interval",
    "MaskSet",
    "PatchThreat",
    "Placement",
    "Rect",
    "Uncovered",
    "Unions",
    "covering_masks",
    "native_footprint",
    "native_threat",
    "nearest_sources",
    "placement",
    "resize_weights",
    "square_side",
]
