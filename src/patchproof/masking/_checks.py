"""What must hold before a certificate means anything: the same masked image gets the same answer, every time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from patchproof.geometry import Fields, MaskSet
from patchproof.masking._arithmetic import network
from patchproof.masking._drift import COPIES, Drift, measure_drift
from patchproof.masking._evaluator import Copies, Evaluator
from patchproof.masking._images import require_images
from patchproof.masking._memory import Measured, out_of_memory
from patchproof.settings import Engine
from patchproof.types import CheckError, Classifier, InputError, Precision

COMPILE_AFTER = 30.0
"""Seconds of passes ahead of a GPU that make compiling, which takes 5 to 15, worth while."""


def check_classifier(
    classifier: Classifier,
    images: Float[Tensor, "b c h w"],
    masks: MaskSet | Fields,
    *,
    num_classes: int | None = None,
    engine: Engine | None = None,
    copies: int = COPIES,
    work: int = 0,
) -> tuple[Measured, Drift]:
    """Refuse a classifier whose logits depend on batch composition, position or the RNG; measure τ of the others.

    Evaluates `copies` masked copies of the images (under two masks, or in one view), spread over them, in batches of
    different size and order, and fast precisions beside float32. The engine returned has τ, a batch size that fits into
    memory, and in place of `auto` whatever is fastest, the passes decided again counted in; `work` is the number of
    passes ahead.
    """
    require_images(images, masks.image_size)
    if not len(images):
        raise InputError("images must be at least one, to measure τ on")
    engine = engine or Engine()
    settled = engine.compile is True and engine.precision != "auto"
    evaluator = Evaluator(classifier, replace(engine, precision=engine.fast, compile=settled))
    keep = masks.keep(images.device)
    drawn = torch.randint(len(masks), (2, copies), generator=torch.Generator().manual_seed(1))
    second = drawn[0] if isinstance(masks, Fields) else drawn[1]  # what two views share is next to nothing
    chosen = Copies(torch.arange(copies) % len(images), drawn[0], second).to(images.device)
    _try_passes(evaluator, images, keep, chosen, num_classes)
    candidates: tuple[Precision, ...] = () if engine.fast == "fp32" else (engine.fast,)
    if images.is_cuda and engine.precision == "auto":
        candidates = get_args(Precision)
    elif images.is_cuda and candidates:
        candidates = tuple(dict.fromkeys((engine.fast, "tf32", "fp32")))
    drift = measure_drift(evaluator, images, keep, chosen, candidates)
    if engine.fast not in ("fp32", *drift.changes):
        raise CheckError(f"logits are NaN or infinite in {engine.fast}; use a wider precision: fp32, or bf16 for fp16")
    way: Any = drift.fastest(engine.precision)
    fast, *later = way.split()
    ahead = work / drift.labels_per_second.get(way, work or 1)  # seconds; none where nothing was timed
    if (engine.compile == "auto" and ahead > COMPILE_AFTER) or (engine.compile is True and engine.fast != fast):
        compiled = replace(engine, precision=fast, compile=True, batch_size=evaluator.chunk)
        try:
            measured, own = check_classifier(classifier, images, masks, engine=compiled, copies=copies)
            return measured, replace(own, again=drift.again, labels_per_second=drift.labels_per_second)
        except CheckError:
            if engine.compile is True:
                raise  # what cannot be compiled runs as it is only where nobody asked for it
    measured = Measured(
        precision=fast,
        batch_size=evaluator.chunk,
        compile=settled,
        tau=drift.tau(fast),
        tau_fp32=drift.tau_fp32,
        tau_tf32=drift.tau("tf32") if "tf32" in later else None,
    )
    return measured, drift


def _try_passes(evaluator: Evaluator, images: Tensor, keep: Tensor, copies: Copies, num_classes: int | None) -> None:
    """The engine's own passes; from here on they work, in chunks that fit."""
    try:
        logits = evaluator.evaluate(images, keep, copies, lambda logits, _: logits)
        if evaluator.engine.compile and len(copies.image) < evaluator.chunk:  # only whole chunks are compiled
            evaluator.evaluate(images, keep, copies.padded(evaluator.chunk), lambda logits, _: logits)
    except CheckError as error:
        if evaluator.engine.compile and _works_eagerly(evaluator.classifier, images, keep):
            raise CheckError(f"torch.compile cannot compile this classifier ({error}); use compile=False") from error
        raise
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        shape, words = tuple(images.shape[1:]), " ".join(str(error).split()[:30])
        raise CheckError(f"not even one image of {shape} fits into memory: {words}") from error
    classes = int(logits.shape[1])
    if classes == 1:
        raise CheckError("the classifier has one output z: give two logits, e.g. torch.cat([-z, z], 1)")
    if classes < 2 or (num_classes is not None and classes != num_classes):
        raise CheckError(
            f"the classifier has {classes} classes, {num_classes or 'at least 2'} were expected; "
            "load weights fine-tuned for this data set, or fine-tune them first"
        )


def _works_eagerly(classifier: Classifier, images: Tensor, keep: Tensor) -> bool:
    try:
        network(classifier)(images[:1], keep[:1])
    except CheckError:
        return False
    return True
