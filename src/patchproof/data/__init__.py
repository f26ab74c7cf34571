"""Images and labels: where they are, how a file becomes RGB pixels, and how pixels become batches."""

from __future__ import annotations

from patchproof.data._decode import MAX_PIXELS, BadImageError, decode, reading, to_rgb
from patchproof.data._loading import (
    BadImage,
    Batch,
    Decoded,
    default_preprocessing,
    evenly_spread,
    iterate_batches,
    load_groups,
    preprocess,
    require_workers,
    spread_indices,
)
from patchproof.data._named import DATASETS, open_dataset
from patchproof.data._sources import (
    EXTENSIONS,
    ArraySource,
    FolderSource,
    ImageSource,
    SequenceSource,
    as_source,
    open_class_folders,
    unit_floats,
)

__all__ = [
    "DATASETS",
    "EXTENSIONS",
    "MAX_PIXELS",
    "ArraySource",
    "BadImage",
    "BadImageError",
    "Batch",
    "Decoded",
    "FolderSource",
    "ImageSource",
    "SequenceSource",
    "as_source",
    "decode",
    "default_preprocessing",
    "evenly_spread",
    "iterate_batches",
    "load_groups",
    "open_class_folders",
    "open_dataset",
    "preprocess",
    "reading",
    "require_workers",
    "spread_indices",
    "to_rgb",
    "unit_floats",
]
