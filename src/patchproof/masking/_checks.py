"""What must hold before a certificate means anything: the same masked image gets the same answer, every time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from patchproof.geometry import MaskSet
from patchproof.masking._arithmetic import network
from patchproof.masking._evaluator import PARTS, Copies, Evaluator
from patchproof.masking._logits import label_margin, top_two
from patchproof.masking._memory import Engine, Measured, out_of_memory
from patchproof.types import CheckError, Classifier, InputError, Precision

SAFETY = 8.0
"""τ of float32 is this many times the largest change of a margin seen between float32 evaluations."""

FAST_SAFETY = 6.0
"""The same between a fast precision and float32, whose changes have a longer tail (docs/decisions/0003-tau.md)."""

COPIES = 512
"""Masked copies that evaluations are compared on, each of another image as far as there are so many."""

ALONE = 16
"""So many of them are also evaluated one at a time."""

REFUSED_DRIFT = 1e-2
"""A float32 logit that changes by more than this share of the largest |logit| is no rounding: the model is refused."""

FAILURES = (RuntimeError, AssertionError, ValueError, IndexError, TypeError, AttributeError)


@dataclass(frozen=True)
class Drift:
    """How far logits and margins change between evaluations of the same masked copies.

    `repeated` and `batching` are the largest change of a logit, evaluated again and in other batches; `gap` that of the
    top-1 margin in float32, and `precision` that between the fast precision and float32. `scale` is the largest
    |logit|, `copies` the number of masked copies compared.
    """

    repeated: float
    batching: float
    gap: float
    precision: float
    scale: float
    copies: int

    @property
    def bound(self) -> float:
        """The smallest change that is assumed whatever was measured: 8 units in the last place of the largest logit."""
        return 8 * torch.finfo(torch.float32).eps * self.scale

    @property
    def tau_fp32(self) -> float:
        """A float32 margin this large has the same sign in any batch."""
        return SAFETY * max(self.gap, self.bound)

    @property
    def tau(self) -> float:
        """A fast margin this large is one of at least τ(fp32) in float32."""
        return self.tau_fp32 + FAST_SAFETY * self.precision


def check_classifier(
    classifier: Classifier,
    images: Float[Tensor, "b c h w"],
    masks: MaskSet,
    *,
    num_classes: int | None = None,
    engine: Engine | None = None,
    copies: int = COPIES,
) -> tuple[Measured, Drift]:
    """Refuse a classifier whose logits depend on batch composition, position or the RNG; measure τ of the others.

    Evaluates `copies` masked copies of the images, spread over them, in batches of different size and order, and a fast
    precision beside float32. The engine returned has τ and a batch size that fits into memory.
    """
    _check_images(images, masks)
    evaluator = Evaluator(classifier, engine or Engine())
    keep = masks.keep(images.device)
    drawn = torch.randint(len(masks), (2, copies), generator=torch.Generator().manual_seed(1))
    chosen = Copies(torch.arange(copies) % len(images), drawn[0], drawn[1]).to(images.device)
    _try_passes(evaluator, images, keep, chosen, num_classes)
    drift = measure_drift(evaluator, images, keep, chosen)
    measured = Measured(
        precision=evaluator.engine.precision,
        batch_size=evaluator.chunk,
        compile=evaluator.engine.compile,
        tau=drift.tau if evaluator.engine.precision != "fp32" else 0.0,
        tau_fp32=drift.tau_fp32,
    )
    return measured, drift


def measure_drift(evaluator: Evaluator, images: Float[Tensor, "b c h w"], keep: Tensor, copies: Copies) -> Drift:
    """Logits in whole chunks, the copies in mixed positions; the same again; in smaller batches; and one at a time."""
    count = len(copies.image)
    size = max(evaluator.chunk, count)
    mixed = (torch.arange(size) % count)[torch.randperm(size, generator=torch.Generator().manual_seed(0))]
    mixed = mixed.to(images.device)
    if evaluator.fixed(images):
        smaller = max(1, evaluator.chunk // PARTS[-1])
    else:
        smaller = max(2, min(evaluator.chunk, count) // 2 + 1)  # the last batch is then ragged

    def logits(rows: Tensor, precision: Precision, largest: int | None = None) -> Tensor:
        found = evaluator.evaluate(
            images, keep, copies.chosen(rows), lambda x, _: x, precision=precision, largest=largest
        )
        wrong = int((~torch.isfinite(found)).sum())
        if wrong:
            remark = "" if precision == "fp32" else f" in {precision}; use a wider one: fp32, or bf16 if this is fp16"
            raise CheckError(
                f"{wrong} of {found.numel()} logits are NaN or infinite{remark}; "
                "check the weights and that images are scaled to [0, 1]"
            )
        return found

    every = torch.arange(count, device=images.device)
    whole, again, small = logits(mixed, "fp32"), logits(mixed, "fp32"), logits(every, "fp32", smaller)
    alone = logits(every[:ALONE], "fp32", 1)
    in_turn = torch.empty_like(small)
    in_turn[mixed] = whole  # one of the positions of each copy
    drift = Drift(
        repeated=_largest(again - whole),
        batching=max(_largest(whole - small[mixed]), _largest(alone - small[: len(alone)])),
        gap=max(
            _margin_change(again, whole),
            _margin_change(whole, small[mixed]),
            _margin_change(alone, small[: len(alone)]),
        ),
        precision=0.0,
        scale=_largest(whole),
        copies=count,
    )
    _check_drift(drift)
    fast = evaluator.engine.precision
    if fast == "fp32":
        return drift
    changes = [_margin_change(logits(mixed, fast), whole), _margin_change(logits(every, fast, smaller), in_turn)]
    return replace(drift, precision=max(changes))


def _margin_change(one: Float[Tensor, "j classes"], other: Float[Tensor, "j classes"]) -> float:
    """Largest change of the top-1 margin between two evaluations: what a flip has to overcome."""
    label, gap = top_two(one)
    return _largest(gap - label_margin(other, label))


def _largest(values: Tensor) -> float:
    return float(values.abs().amax()) if values.numel() else 0.0


def _check_images(images: Tensor, masks: MaskSet) -> None:
    if images.ndim != 4 or not images.numel() or tuple(images.shape[-2:]) != masks.image_size:
        raise InputError(
            f"images must be (images, channels, height, width), at least one, of the masks' {masks.image_size}, not of "
            f"{tuple(images.shape)}"
        )
    smallest, largest = torch.stack(images.aminmax()).tolist()
    if not (images.is_floating_point() and 0 <= smallest <= largest <= 1):
        raise InputError(
            f"images must be floats in [0, 1], not {images.dtype} from {smallest:.9g} to {largest:.9g}; divide bytes "
            "by 255, and leave normalisation to the classifier"
        )


def _try_passes(evaluator: Evaluator, images: Tensor, keep: Tensor, copies: Copies, num_classes: int | None) -> None:
    """The engine's own passes; from here on they work, in chunks that fit."""
    try:
        logits = evaluator.evaluate(images, keep, copies, _checked_logits)
    except CheckError:
        raise
    except FAILURES as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        shape = tuple(images.shape[1:])
        if out_of_memory(error):
            raise CheckError(f"not even one image of {shape} fits into memory: {first_line}") from error
        if evaluator.engine.compile and _works_eagerly(evaluator.classifier, images, keep):
            raise CheckError(
                f"torch.compile cannot compile this classifier ({first_line}); use compile=False"
            ) from error
        raise CheckError(
            f"the classifier does not accept images of {shape} (channels, height, width): {first_line}; "
            "choose the image size it was built for"
        ) from error
    classes = int(logits.shape[1])
    if classes < 2 or (num_classes is not None and classes != num_classes):
        raise CheckError(
            f"the classifier has {classes} classes, {num_classes or 'at least 2'} were expected; "
            "load weights fine-tuned for this data set, or fine-tune them first"
        )


def _checked_logits(logits: Tensor, rows: slice) -> Tensor:
    if logits.ndim != 2 or len(logits) != rows.stop - rows.start:
        raise CheckError(
            f"the classifier maps {rows.stop - rows.start} images to {tuple(logits.shape)}; it must return logits of "
            f"shape ({rows.stop - rows.start}, classes)"
        )
    return logits


def _works_eagerly(classifier: Classifier, images: Tensor, keep: Tensor) -> bool:
    try:
        network(classifier)(images[:1], keep[:1])
    except FAILURES:
        return False
    return True


def _check_drift(drift: Drift) -> None:
    if drift.scale == 0:
        raise CheckError("the classifier answers zero for every class and image; load trained weights")
    limit = REFUSED_DRIFT * drift.scale
    if drift.repeated > limit:
        raise CheckError(
            f"the classifier answers differently when asked twice: a logit changed by {drift.repeated:.3g} of "
            f"{drift.scale:.3g}; switch off dropout and every other randomness, since a certificate needs one answer "
            "per image"
        )
    if drift.batching > limit:
        raise CheckError(
            f"the classifier's logits depend on the rest of the batch or the position in it: one changed by "
            f"{drift.batching:.3g} of {drift.scale:.3g}; use stored normalisation statistics (eval mode), since a "
            "certificate needs one answer per image"
        )
