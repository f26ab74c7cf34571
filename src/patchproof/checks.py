"""What must hold before a certificate means anything: the same masked image gets the same answer, every time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from patchproof.geometry import MaskSet
from patchproof.masking import Engine, fill_colour, forward, occlude
from patchproof.types import CheckError, Classifier, Precision

SAFETY = 8.0
"""τ is this many times the largest logit change seen (docs/decisions/0003-tau.md)."""

REFUSED_DRIFT = 1e-2
"""A float32 logit that moves by more than this share of the largest |logit| is no rounding: the model is refused."""


@dataclass(frozen=True)
class Drift:
    """Largest change of a logit between two evaluations of the same images; `scale` is the largest |logit|."""

    repeated: float
    batching: float
    precision: float
    scale: float

    @property
    def tau_fp32(self) -> float:
        """A float32 lead of 2·drift survives both logits moving towards each other; rounding is never quite zero."""
        rounding = 4 * torch.finfo(torch.float32).eps * self.scale
        return SAFETY * 2 * max(self.repeated, self.batching, rounding)

    @property
    def tau(self) -> float:
        return self.tau_fp32 + SAFETY * 2 * self.precision


def check_classifier(
    classifier: Classifier,
    images: Float[Tensor, "b c h w"],
    masks: MaskSet,
    *,
    num_classes: int,
    engine: Engine | None = None,
) -> tuple[Engine, Drift]:
    """Refuse a classifier no certificate can be about; return the engine with τ measured on it.

    Looks at the given images, clean and under each mask, in batches of different size, order and company.
    """
    engine = engine or Engine()
    _check_mode(classifier)
    copies = _sample_copies(classifier, images, masks)
    logits = _try_forward(classifier, copies[: engine.chunk])
    _check_shape(logits, copies[: engine.chunk], num_classes)
    drift = measure_drift(classifier, copies, engine=engine)
    _check_drift(drift)
    return replace(engine, tau=drift.tau if engine.precision != "fp32" else 0.0, tau_fp32=drift.tau_fp32), drift


def measure_drift(classifier: Classifier, copies: Float[Tensor, "j c h w"], *, engine: Engine) -> Drift:
    """How far logits move when nothing but the batch, its order, or the arithmetic changes.

    Each copy alone is the yardstick. Beside it: whole chunks, as the run will use them, filled with the copies in mixed
    places; the same chunks again; smaller ones of an odd size, whose last one is ragged; and the fast precision.
    """
    alone = _in_batches(classifier, copies, size=1)
    _check_finite(alone, "")
    places = torch.arange(max(engine.chunk, len(copies)), device=copies.device) % len(copies)
    mixed = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(0)).to(places.device)]
    whole = _in_batches(classifier, copies[mixed], size=engine.chunk)
    again = _in_batches(classifier, copies[mixed], size=engine.chunk)
    odd = _in_batches(classifier, copies, size=max(2, min(engine.chunk, len(copies)) // 2 + 1))
    fast = _in_batches(classifier, copies[mixed], size=engine.chunk, precision=engine.precision)
    _check_finite(fast, f" in {engine.precision}, which overflows; use bf16 or fp32")
    return Drift(
        repeated=_largest(again - whole),
        batching=max(_largest(whole - alone[mixed]), _largest(odd - alone)),
        precision=_largest(fast - alone[mixed]),
        scale=max(_largest(alone), _largest(whole)),
    )


def _check_finite(logits: Tensor, remark: str) -> None:
    wrong = int((~torch.isfinite(logits)).sum())
    if wrong:
        raise CheckError(
            f"{wrong} of {logits.numel()} logits are NaN or infinite{remark}; "
            "check the weights and that images are scaled to [0, 1]"
        )


def _check_mode(classifier: Classifier) -> None:
    if isinstance(classifier, nn.Module) and any(m.training for m in classifier.modules()):
        names = [name or type(m).__name__ for name, m in classifier.named_modules() if m.training]
        raise CheckError(
            f"the classifier is in training mode ({len(names)} modules, e.g. {names[0]}); call classifier.eval() first"
        )


def _check_shape(logits: Tensor, images: Tensor, num_classes: int) -> None:
    if logits.ndim != 2 or len(logits) != len(images):
        raise CheckError(
            f"the classifier maps images of shape {tuple(images.shape)} to {tuple(logits.shape)}; "
            f"it must return logits of shape ({len(images)}, classes)"
        )
    if logits.shape[1] != num_classes or num_classes < 2:
        raise CheckError(
            f"the classifier answers {logits.shape[1]} classes, {num_classes} were expected (at least 2); "
            "load weights fine-tuned for this data set, or fine-tune them first"
        )


def _check_drift(drift: Drift) -> None:
    if drift.scale == 0:
        raise CheckError("the classifier answers zero for every class and image; load trained weights")
    limit = REFUSED_DRIFT * drift.scale
    if drift.repeated > limit:
        raise CheckError(
            f"the classifier answers differently when asked twice: a logit moved by {drift.repeated:.3g} of "
            f"{drift.scale:.3g}; switch off dropout and every other randomness, since a certificate needs one answer "
            "for one image"
        )
    if drift.batching > limit:
        raise CheckError(
            f"the classifier's answer depends on the other images of the batch or the place in it: a logit moved by "
            f"{drift.batching:.3g} of {drift.scale:.3g}; use stored normalisation statistics (eval mode), since a "
            "certificate needs one answer for one image"
        )


def _sample_copies(classifier: Classifier, images: Tensor, masks: MaskSet) -> Tensor:
    """Each image clean and under one mask, the masks in turn."""
    keep = masks.keep(images.device)
    turn = torch.arange(len(images), device=images.device) % len(masks)
    return torch.cat([images, occlude(images, keep[turn], fill_colour(classifier, images))])


def _try_forward(classifier: Classifier, images: Tensor) -> Tensor:
    try:
        return forward(classifier, images)
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckError(
            f"the classifier does not accept images of {tuple(images.shape[1:])} (channels, height, width): "
            f"{first_line}; choose the input size it was built for with --image-size"
        ) from error


def _in_batches(classifier: Classifier, images: Tensor, *, size: int, precision: Precision = "fp32") -> Tensor:
    return torch.cat([forward(classifier, part, precision=precision) for part in images.split(size)])


def _largest(values: Tensor) -> float:
    return float(values.abs().amax()) if values.numel() else 0.0
