"""τ for a run: measured on its own images, or on generated ones if those may be hostile."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from patchproof.data import ImageSource, evenly_spread, iterate_batches
from patchproof.defenses import device_of
from patchproof.geometry import covering_masks
from patchproof.masking import Drift, Engine, Measured, as_images, check_classifier, evaluating, require_two, show
from patchproof.models import mask_colour
from patchproof.types import InputError, Preprocessing

MOST_COPIES, FEWEST_COPIES = 512, 16
SHARE = 4
"""In float32, a run compares at most one in SHARE of its one-mask copies, so that small runs stay quick."""

MANY_COPIES, MANY_PASSES = 2048, 200_000
"""A run of at least MANY_PASSES in a fast precision compares MANY_COPIES, which makes its τ smaller."""

CHECKED_FLOATS = 1 << 29
"""Most numbers in the images that the classifier is checked on: two gigabytes."""


def engine_of(defense: Any) -> Engine:
    """The defence's engine, or the default for a defence without one."""
    return getattr(defense, "engine", None) or Engine()


def bare_logits(classifier: Any, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
    """What the classifier returns for these images; one output is refused."""
    with torch.no_grad(), evaluating(classifier):
        logits = show(classifier, images, None)
    require_two(logits.shape[1])
    return logits


def measure_tau(
    defense: Any,
    source: ImageSource,
    indices: Sequence[int],
    preprocessing: Preprocessing,
    *,
    engine: Engine | None = None,
) -> tuple[Measured, Drift] | None:
    """Measure τ on a few images spread over the run; None for a defence without a classifier."""
    if getattr(defense, "classifier", None) is None:
        return None
    device, masks = device_of(defense), _masks(defense)
    engine = engine or engine_of(defense)
    if not hasattr(defense, "with_engine"):  # its certificates do not rest on τ: the check of the classifier is enough
        small = FEWEST_COPIES if engine.batch_size == "auto" else engine.batch_size
        engine = replace(engine, precision="fp32", compile=False, batch_size=small)
    work = len(indices) * int(getattr(defense, "most_passes", len(masks)))
    if _in_float32(engine, device):
        copies = max(FEWEST_COPIES, min(MOST_COPIES, len(indices) * len(masks) // SHARE))
    else:
        copies = MANY_COPIES if work >= MANY_PASSES else MOST_COPIES
    height, width = defense.threat.image_size
    wanted = max(FEWEST_COPIES, min(copies, CHECKED_FLOATS // (3 * height * width)))
    spread = [indices[i] for i in evenly_spread(wanted, len(indices))]
    reason = ""
    for candidates in (spread, indices):
        for batch in iterate_batches(source, preprocessing, candidates, batch_size=wanted, skip_bad=True):
            if len(batch.images):
                return _measured(defense, engine, as_images(batch.images, device), copies, work)
            reason = reason or f", e.g. {batch.bad[0].path}: {batch.bad[0].reason}"
    raise InputError(f"none of the {len(indices)} images can be read{reason}")


def measure_on_generated(defense: Any) -> tuple[Measured, Drift] | None:
    """Measure τ on generated images, because an image that somebody hands in must not choose its own τ."""
    if getattr(defense, "classifier", None) is None:
        return None
    images, engine = generated_images(64, defense), engine_of(defense)
    copies = len(images) if _in_float32(engine, images.device) else MOST_COPIES
    return _measured(defense, engine, images.contiguous(memory_format=torch.channels_last), copies)


def generated_images(count: int, defense: Any) -> Float[Tensor, "n c h w"]:
    """Return random colour gradients of several scales with some noise, the same at every call."""
    channels, size = len(mask_colour(defense.classifier) or (0.5,) * 3), defense.threat.image_size
    generator = torch.Generator().manual_seed(0)
    images = torch.zeros(count, channels, *size)
    for cells in (2, 5, 11):
        coarse = torch.rand(count, channels, cells, cells, generator=generator)
        images += functional.interpolate(coarse, size=size, mode="bilinear", align_corners=False)
    return (images / 3 + 0.1 * torch.randn(images.shape, generator=generator)).clamp(0, 1).to(device_of(defense))


def _measured(defense: Any, engine: Engine, images: Tensor, copies: int, work: int = 0) -> tuple[Measured, Drift]:
    classes = getattr(defense.classifier, "num_classes", None)
    measured, drift = check_classifier(
        defense.classifier, images, _masks(defense), num_classes=classes, engine=engine, copies=copies, work=work
    )
    logger = logging.getLogger("patchproof")
    if remark := drift.remark(engine.precision):
        level = logging.INFO if engine.precision == "auto" else logging.WARNING
        logger.log(level, remark + ("; compiled" if measured.compile else ""))
    fast = "" if measured.fast == "fp32" else f"{measured.tau:.3g} in {measured.fast}, "
    logger.debug(
        f"a label needs a margin of {fast}{measured.tau_fp32:.3g} in float32, measured on {drift.copies} masked "
        f"copies; batches of {measured.batch_size}"
    )
    return measured, drift


def _in_float32(engine: Engine, device: torch.device) -> bool:
    return engine.precision == "fp32" or (engine.precision == "auto" and device.type == "cpu")


def _masks(defense: Any) -> Any:
    """The defence's own occlusions or masks, or else a covering set."""
    own = getattr(defense, "occlusions", getattr(defense, "masks", None))
    return covering_masks(defense.threat, per_axis=3) if own is None else own
