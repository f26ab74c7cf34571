"""Defences against a patch that is measured on the original image: its footprint depends on the size of that image."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from patchproof.geometry import PatchThreat, native_threat, parse_patches, size_words
from patchproof.runs._measure import measure_on_generated
from patchproof.types import InputError, Preprocessing, Size, visible


def footprint_threat(
    patch: str, native_sizes: Mapping[Size, str], preprocessing: Preprocessing, *, patches: int = 1
) -> PatchThreat:
    """𝓡 at the network input that contains every footprint of `patch` (`3%`, `5px`) on images of these sizes.

    `native_sizes` has an example of each, to be named if the patch does not fit it.
    """
    if not native_sizes:
        raise InputError("no image can be read, so there is no native size to measure the patch on")
    found = []
    for size, example in sorted(native_sizes.items()):
        sizes = parse_patches(patch, size)
        try:
            found.append(native_threat(native_size=size, patch_sizes=sizes, preprocessing=preprocessing))
        except InputError as error:
            raise InputError(f"{error}, or leave out {visible(example)}") from error
    footprints = tuple(sorted({size for threat in found for size in threat.patch_sizes}))
    threat = PatchThreat(found[0].image_size, footprints, patches)
    if len({one.patch_sizes for one in found}) > 1:
        logging.getLogger("patchproof").info(
            "footprints differ by the size of the image: one defence for all images is built for the largest, "
            f"{size_words(threat.largest)} pixels"
        )
    return threat


def with_shared_tau(build: Callable[[Size], Any], on_measure: Callable[[], None]) -> Callable[[Size], Any]:
    """The defence that `build` makes for images of a size, with τ measured once, on generated images, for all sizes.

    `on_measure` is called before τ is measured.
    """
    engine = None

    @cache
    def measured(size: Size) -> Any:
        nonlocal engine
        defense = build(size)
        if not hasattr(defense, "with_engine"):  # it needs no τ
            return defense
        if engine is None:
            on_measure()
            engine, _ = measure_on_generated(defense)  # type: ignore[misc]
        return defense.with_engine(engine)

    return measured
