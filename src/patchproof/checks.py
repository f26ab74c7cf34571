"""What must hold before a certificate means anything: the same masked image gets the same answer, every time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from patchproof.geometry import MaskSet
from patchproof.masking import (
    PARTS,
    Copies,
    Engine,
    Runner,
    fill_colour,
    forward,
    label_margin,
    occlude,
    out_of_memory,
    top_two,
)
from patchproof.types import CheckError, Classifier, InputError, Precision

SAFETY = 8.0
"""τ of float32 is this many times the largest change of a gap seen between float32 evaluations."""

FAST_SAFETY = 6.0
"""The same between a fast precision and float32, whose changes have a longer tail (docs/decisions/0003-tau.md)."""

FAST_COPIES = 512
"""Masked copies that a fast precision is compared on, each of another image as far as there are so many."""

DRIFT_IMAGES = 8
"""Images that float32 is compared with itself on."""

REFUSED_DRIFT = 1e-2
"""A float32 logit that moves by more than this share of the largest |logit| is no rounding: the model is refused."""


@dataclass(frozen=True)
class Drift:
    """How far answers move between evaluations of the same images.

    `repeated` and `batching` are the largest change of a logit, asked again and in other batches; `gap` that of a
    label's lead over its runner-up, in float32, and `precision` the same between the fast precision and float32.
    `scale` is the largest |logit|, `copies` how many masked copies `precision` was measured on.
    """

    repeated: float
    batching: float
    gap: float
    precision: float
    scale: float
    copies: int

    @property
    def tau_fp32(self) -> float:
        """A lead this large is there in any batch; rounding is never quite zero, whatever the sample shows."""
        rounding = 8 * torch.finfo(torch.float32).eps * self.scale
        return SAFETY * max(self.gap, rounding)

    @property
    def tau(self) -> float:
        """A fast lead this large is one of at least τ(fp32) in float32."""
        return self.tau_fp32 + FAST_SAFETY * self.precision


def check_classifier(
    classifier: Classifier,
    images: Float[Tensor, "b c h w"],
    masks: MaskSet,
    *,
    num_classes: int,
    engine: Engine | None = None,
) -> tuple[Engine, Drift]:
    """Refuse a classifier no certificate can be about; return the engine with τ measured on it, in chunks that fit.

    Looks at the first few images, clean and masked, in batches of different size, order and company; and for a fast
    precision at masked copies of all of them.
    """
    engine = engine or Engine()
    _check_images(images, masks)
    _check_mode(classifier)
    runner = Runner(classifier, engine)
    few = images[:DRIFT_IMAGES]
    drawn = _random_pairs(len(few), masks, len(few), images.device)
    keep = masks.keep(images.device)
    copies = occlude(few[drawn.image], keep[drawn.first] & keep[drawn.second], fill_colour(classifier, images))
    logits = _try_forward(runner, copies[: engine.chunk])
    _check_shape(logits, copies[: engine.chunk], num_classes)
    drift = measure_drift(runner, torch.cat([few, copies]))
    _check_drift(drift)
    if engine.precision != "fp32":
        drift = _compare_precisions(runner, images, keep, _random_pairs(len(images), masks, FAST_COPIES), drift)
    tau = drift.tau if engine.precision != "fp32" else 0.0
    return replace(engine, chunk=runner.chunk, tau=tau, tau_fp32=drift.tau_fp32), drift


def measure_drift(runner: Runner, copies: Float[Tensor, "j c h w"]) -> Drift:
    """How far float32 logits move when nothing but the batch or its order changes.

    Each copy alone is the yardstick. Beside it: whole chunks, as the run will use them, filled with the copies in mixed
    places; the same chunks again; and smaller ones, whose last one is ragged.
    """
    alone = torch.cat([forward(runner.classifier, one) for one in copies.split(1)])
    _check_finite(alone, "")
    mixed = _mixed_places(max(runner.chunk, len(copies)), len(copies)).to(copies.device)
    whole = _in_batches(runner, copies, mixed)
    again = _in_batches(runner, copies, mixed)
    small = torch.stack([_in_batches(runner, copies, size=size) for size in _small_sizes(runner, copies)])
    return Drift(
        repeated=_largest(again - whole),
        batching=max(_largest(whole - alone[mixed]), _largest(small - alone)),
        gap=max(_gap_change(again, whole), _gap_change(whole, alone[mixed]), *(_gap_change(s, alone) for s in small)),
        precision=0.0,
        scale=max(_largest(alone), _largest(whole)),
        copies=0,
    )


def _small_sizes(runner: Runner, images: Tensor) -> tuple[int, ...]:
    """Sizes of batches, besides whole chunks, that the run will use: any, or where they are fixed the smaller ones."""
    if runner.fixed(images):
        return tuple(max(1, runner.chunk // part) for part in PARTS[1:])
    return (max(2, min(runner.chunk, len(images)) // 2 + 1),)


def _compare_precisions(runner: Runner, images: Tensor, keep: Tensor, copies: Copies, drift: Drift) -> Drift:
    """The fast precision against float32: in whole chunks, the copies in mixed places, and in small ones."""
    precision = runner.engine.precision

    def logits(places: Tensor, precision: Precision) -> Tensor:
        chosen = Copies(*(t[places] for t in copies))
        return runner.evaluate(images, keep, chosen, lambda found, _: found, precision=precision)

    places = _mixed_places(max(runner.chunk, len(copies.image)), len(copies.image))
    sure = logits(torch.arange(len(copies.image)), "fp32")
    changes = []
    for size in (len(places), *_small_sizes(runner, images)):
        for part in places[: 2 * len(copies.image)].split(size):
            fast = logits(part, precision)
            _check_finite(fast, f" in {precision}; use a wider one: fp32, or bf16 if this is fp16")
            changes.append(_gap_change(fast, sure[part.to(sure.device)]))
    return replace(drift, precision=max(changes), copies=len(copies.image))


def _gap_change(one: Float[Tensor, "j classes"], other: Float[Tensor, "j classes"]) -> float:
    """How far the lead of each copy's label, by `one`, is off by `other`: what a flip has to overcome."""
    label, gap = top_two(one)
    return _largest(gap - label_margin(other, label))


def _mixed_places(count: int, copies: int) -> Tensor:
    """`count` places, each copy in about as many of them as any other, in a fixed random order."""
    return (torch.arange(count) % copies)[torch.randperm(count, generator=torch.Generator().manual_seed(0))]


def _check_finite(logits: Tensor, remark: str) -> None:
    wrong = int((~torch.isfinite(logits)).sum())
    if wrong:
        raise CheckError(
            f"{wrong} of {logits.numel()} logits are NaN or infinite{remark}; "
            "check the weights and that images are scaled to [0, 1]"
        )


def _check_images(images: Tensor, masks: MaskSet) -> None:
    if not images.numel():
        raise InputError("a classifier is checked on images; give at least one")
    if images.ndim != 4 or tuple(images.shape[-2:]) != masks.image_size:
        raise InputError(
            f"images must be (images, channels, height, width) of the masks' {masks.image_size}, not of "
            f"{tuple(images.shape)}"
        )
    smallest, largest = torch.stack(images.aminmax()).tolist()
    if not (images.is_floating_point() and 0 <= smallest <= largest <= 1):
        raise InputError(
            f"images must be floats in [0, 1], not {images.dtype} from {smallest:.9g} to {largest:.9g}; divide bytes "
            "by 255, and leave normalisation to the classifier"
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


def _random_pairs(images: int, masks: MaskSet, count: int, device: torch.device | str = "cpu") -> Copies:
    """`count` copies of the images in turn, each under two masks drawn at random."""
    drawn = torch.randint(len(masks), (2, count), generator=torch.Generator().manual_seed(1))
    return Copies(torch.arange(count) % images, drawn[0], drawn[1]).to(torch.device(device))


def _try_forward(runner: Runner, images: Tensor) -> Tensor:
    """The engine's own passes; from here on they work, in chunks that fit."""
    try:
        return _in_batches(runner, images, precision=runner.engine.precision)
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        if out_of_memory(error):
            raise CheckError(
                f"not even one image of {tuple(images.shape[1:])} fits into memory: {first_line}"
            ) from error
        if runner.engine.compile and _works_eagerly(runner, images):
            raise CheckError(
                f"torch.compile cannot compile this classifier ({first_line}); leave out --compile"
            ) from error
        raise CheckError(
            f"the classifier does not accept images of {tuple(images.shape[1:])} (channels, height, width): "
            f"{first_line}; choose the input size it was built for with --image-size"
        ) from error


def _works_eagerly(runner: Runner, images: Tensor) -> bool:
    try:
        forward(runner.classifier, images[:1])
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError):
        return False
    return True


def _in_batches(
    runner: Runner,
    images: Tensor,
    places: Tensor | None = None,
    *,
    size: int | None = None,
    precision: Precision = "fp32",
) -> Tensor:
    """Logits of the images in these places, `size` or a whole chunk at a time."""
    places = torch.arange(len(images), device=images.device) if places is None else places

    def answer(start: int, count: int) -> Tensor:
        parts = images[places[start : start + count]].split(size or count)
        return torch.cat([runner.logits(part, precision=precision) for part in parts])

    return torch.cat(runner.in_chunks(len(places), answer, fixed=runner.fixed(images)))


def _largest(values: Tensor) -> float:
    return float(values.abs().amax()) if values.numel() else 0.0
