"""What must hold before a certificate means anything: the same masked image gets the same label every time.

`check_classifier` refuses a classifier for which this cannot hold and measures τ for the others: how far margins change
between evaluations of the same masked copies (docs/decisions/0003-tau.md).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from patchproof.geometry import Fields, MaskSet
from patchproof.masking._arithmetic import network
from patchproof.masking._evaluator import Copies, Evaluator
from patchproof.masking._images import require_images
from patchproof.masking._labels import Measured, label_margin, top_two
from patchproof.masking._memory import out_of_memory
from patchproof.settings import Engine
from patchproof.types import CheckError, Classifier, InputError, Precision, PrecisionChoice, kind_of

COPIES = 512
"""Masked copies that are compared, each of another image if there are enough images."""

ALONE = 16
"""How many of these are also evaluated one at a time."""


@dataclass(frozen=True)
class Drift:
    """How far logits and margins change between evaluations of the same masked copies.

    `repeated` and `batching` are the largest change of a float32 logit, evaluated again and in other batches; `gap` is
    the largest change of a top-1 margin between all of these. `scale` is the largest |logit|, `copies` the number of
    masked copies compared. For each other precision whose logits are finite, `changes` has the mean of the largest
    hundredth of the margin changes from float32, and `again` the share of labels that it leaves to be decided again.
    `labels_per_second` was timed on a GPU for every sequence of precisions that a label may go through.
    """

    repeated: float
    batching: float
    gap: float
    scale: float
    copies: int
    changes: Mapping[str, float] = field(default_factory=dict)
    again: Mapping[str, float] = field(default_factory=dict)
    labels_per_second: Mapping[str, float] = field(default_factory=dict)

    @property
    def bound(self) -> float:
        """The smallest change assumed in any case: 8 units in the last place of the largest logit."""
        return 8 * torch.finfo(torch.float32).eps * self.scale

    @property
    def tau_fp32(self) -> float:
        """τ(fp32) = 8 · max(gap, bound): a float32 margin this large has the same sign in any batch."""
        return 8.0 * max(self.gap, self.bound)

    def tau(self, precision: str) -> float:
        """A margin this large in `precision` is at least τ(fp32) in float32, where every label is decisive."""
        if precision == "fp32":
            return 0.0
        safety = 5.5 if self.copies >= 2048 else 6.5  # the mean of more changes varies less
        return self.tau_fp32 + safety * self.changes[precision]

    def fastest(self, precision: PrecisionChoice) -> str:
        """Return the fastest sequence of precisions, e.g. `fp16 fp32`: of those that begin with this one, or of all."""
        rates = self.labels_per_second
        ways = [way for way in rates if precision in ("auto", way.split()[0])]
        untimed = "fp32" if precision in ("auto", "fp32") else f"{precision} fp32"
        return max(ways, key=lambda way: rates[way], default=untimed)

    def remark(self, precision: PrecisionChoice) -> str:
        """Say which precision `auto` takes and why, or what speaks against the precision asked for; otherwise ''."""
        best, own = self.fastest("auto"), self.fastest(precision)
        if precision == "auto" and self.labels_per_second:
            shown = []
            for name in dict.fromkeys(way.split()[0] for way in self.labels_per_second):
                rate = self.labels_per_second[self.fastest(name)]  # type: ignore[arg-type]
                shown.append(f"{name} {rate:,.0f} ({self.again[name]:.0%} decided again)")
            return f"precision {best.split()[0]}; labels per second: {', '.join(shown)}"
        again = self.again.get(own.split()[0], 0.0)
        if again <= 0.2:
            return ""
        faster = best != own and self.labels_per_second
        better = f"{best.split()[0]} would be faster" if faster else "auto takes the fastest"
        return f"{precision} decides {again:.0%} of the labels again; {better}"


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
    """Refuse a classifier whose logits depend on batch composition, position or the RNG; measure τ for the others.

    `copies` masked copies of the images are evaluated in batches of different size and order, and in fast precisions as
    well as float32. The engine returned has τ, a batch size that fits into memory and, in place of `auto`, whatever
    decides labels fastest. `work` is the number of passes ahead.
    """
    if not isinstance(masks, MaskSet | Fields):
        raise InputError(f"masks must be a pp.MaskSet, e.g. covering_masks(threat, per_axis=3), not {kind_of(masks)}")
    require_images(images, masks.image_size)
    if not len(images):
        raise InputError("images must be at least one, to measure τ on")
    engine = engine or Engine()
    compiled = engine.compile is True and engine.precision != "auto"
    evaluator = Evaluator(classifier, replace(engine, precision=engine.fast, compile=compiled))
    keep = masks.keep(images.device)
    first, second = torch.randint(len(masks), (2, copies), generator=torch.Generator().manual_seed(1))
    if isinstance(masks, Fields):  # two views together show next to nothing
        second = first
    chosen = Copies(torch.arange(copies) % len(images), first, second).to(images.device)
    _try_passes(evaluator, images, keep, chosen, num_classes)
    candidates: Sequence[Precision] = () if engine.fast == "fp32" else (engine.fast,)
    if images.is_cuda and engine.precision == "auto":
        candidates = get_args(Precision)
    elif images.is_cuda and candidates:
        candidates = list(dict.fromkeys((engine.fast, "tf32", "fp32")))
    drift = measure_drift(evaluator, images, keep, chosen, candidates)
    if engine.fast not in ("fp32", *drift.changes):
        raise CheckError(f"logits are NaN or infinite in {engine.fast}; use a wider precision: fp32, or bf16 for fp16")
    way: Any = drift.fastest(engine.precision)
    fast, *later = way.split()
    rate = drift.labels_per_second.get(way)
    much = rate is not None and work / rate > 30  # seconds; compiling takes 5 to 15
    if (engine.compile == "auto" and much) or (engine.compile is True and engine.fast != fast):
        settled = replace(engine, precision=fast, compile=True, batch_size=evaluator.chunk)
        try:
            measured, own = check_classifier(classifier, images, masks, engine=settled, copies=copies)
            return measured, replace(own, again=drift.again, labels_per_second=drift.labels_per_second)
        except CheckError:
            if engine.compile is True:  # with `auto`, a classifier that cannot be compiled runs as it is
                raise
    measured = Measured(
        precision=fast,
        batch_size=evaluator.chunk,
        compile=compiled,
        tau=drift.tau(fast),
        tau_fp32=drift.tau_fp32,
        tau_tf32=drift.tau("tf32") if "tf32" in later else None,
    )
    return measured, drift


def _try_passes(evaluator: Evaluator, images: Tensor, keep: Tensor, copies: Copies, num_classes: int | None) -> None:
    """Run the engine's own passes once, so that from here on they work, in chunks that fit into memory."""
    try:
        logits = evaluator.evaluate(images, keep, copies, lambda logits, _: logits)
        if evaluator.engine.compile and len(copies.image) < evaluator.chunk:  # only whole chunks are compiled
            evaluator.evaluate(images, keep, copies.padded(evaluator.chunk), lambda logits, _: logits)
    except CheckError as error:
        if not evaluator.engine.compile:
            raise
        network(evaluator.classifier)(images[:1], keep[:1])  # raises an error that is the classifier's own
        raise CheckError(f"torch.compile cannot compile this classifier ({error}); use compile=False") from error
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        shape, words = tuple(images.shape[1:]), " ".join(str(error).split()[:30])
        raise CheckError(f"not even one image of {shape} fits into memory: {words}") from error
    classes = int(logits.shape[1])
    require_two(classes)
    names = getattr(evaluator.classifier, "class_names", None)
    if names is not None and len(names) != classes:
        raise CheckError(f"the classifier has {classes} outputs and {len(names)} class_names; give as many names")
    if num_classes is not None and classes != num_classes:
        raise CheckError(
            f"the classifier has {classes} classes, {num_classes} were expected; load weights fine-tuned for this data "
            "set, or fine-tune them first"
        )


def require_two(outputs: int | None) -> None:
    """Refuse a classifier with one output; None: it does not say how many it has."""
    if outputs == 1:
        raise CheckError("the classifier has one output z: give two logits, e.g. torch.cat([-z, z], 1)")


def measure_drift(
    evaluator: Evaluator, images: Tensor, keep: Tensor, copies: Copies, precisions: Sequence[Precision]
) -> Drift:
    """Compare float32 logits in whole chunks and mixed positions with those of the same passes again, of smaller
    batches, and of single copies; then those of the other precisions with float32. On a GPU, time all precisions."""
    count = len(copies.image)
    size = max(evaluator.chunk, count)
    mixed = (torch.arange(size) % count)[torch.randperm(size, generator=torch.Generator().manual_seed(0))]
    mixed = mixed.to(images.device)
    every, some = torch.arange(count, device=images.device), mixed[: max(evaluator.chunk, min(count, COPIES))]
    smaller = max(2, min(evaluator.chunk, count) // 2 + 1)  # the last batch is then ragged
    if evaluator.fixed(images):
        smaller = max(1, evaluator.chunk // 8)  # the smallest of the fixed sizes

    def logits(rows: Tensor, precision: Precision, largest: int | None = None) -> Tensor:
        asked = copies.chosen(rows)
        return evaluator.evaluate(images, keep, asked, lambda x, _: x, precision=precision, largest=largest)

    whole, again = logits(mixed, "fp32"), logits(some, "fp32")
    wrong = int((~torch.isfinite(whole)).sum())
    if wrong:
        raise CheckError(
            f"{wrong} of {whole.numel()} logits are NaN or infinite; check the weights and that images are scaled to "
            "[0, 1]"
        )
    small, alone = logits(every, "fp32", smaller), logits(every[:ALONE], "fp32", 1)
    compared = [(again, whole[: len(some)]), (whole, small[mixed]), (alone, small[: len(alone)])]
    repeated, *batching = [float((one - other).abs().amax()) for one, other in compared]
    drift = Drift(
        repeated=repeated,
        batching=max(batching),
        gap=max(float(margin_changes(one, other).amax()) for one, other in compared),
        scale=float(whole.abs().amax()),
        copies=count,
    )
    _refuse(drift)
    gaps: dict[Precision, Tensor] = {"fp32": top_two(small)[1]}
    changes = {}
    for precision in precisions:
        if precision == "fp32":
            continue
        fast, fast_small = logits(mixed, precision), logits(every, precision, smaller)
        if bool(fast.isfinite().all() & fast_small.isfinite().all()):
            found = torch.cat([margin_changes(fast, whole), margin_changes(fast_small, small)])
            changes[str(precision)] = float(found.topk(max(1, len(found) // 100)).values.mean())
            gaps[precision] = top_two(fast_small)[1]
    drift = replace(drift, changes=changes)
    open_at = {name: gap < drift.tau(name) for name, gap in gaps.items()}
    drift = replace(drift, again={name: float(open_at[name].float().mean()) for name in gaps if name in precisions})
    if not images.is_cuda:
        return drift
    torch.cuda.synchronize(images.device)
    seconds = {}
    for precision in gaps:
        started = time.perf_counter()
        logits(some, precision)
        torch.cuda.synchronize(images.device)
        seconds[precision] = (time.perf_counter() - started) / len(some)
    return replace(drift, labels_per_second=labels_per_second(open_at, seconds))


def _refuse(drift: Drift) -> None:
    """Refuse a classifier whose float32 logits change by more than 1% of the largest: that is no rounding."""
    if drift.scale == 0:
        raise CheckError("the classifier answers zero for every class and image; load trained weights")
    if drift.repeated > 0.01 * drift.scale:
        raise CheckError(
            f"the classifier answers differently when asked twice: a logit changed by {drift.repeated:.3g} of "
            f"{drift.scale:.3g}; switch off dropout and every other randomness, since a certificate needs one answer "
            "per image"
        )
    if drift.batching > 0.01 * drift.scale:
        raise CheckError(
            "the classifier's logits depend on the rest of the batch or the position in it: one changed by "
            f"{drift.batching:.3g} of {drift.scale:.3g}; use stored normalisation statistics (eval mode), since a "
            "certificate needs one answer per image"
        )


def labels_per_second(open_at: Mapping[Any, Bool[Tensor, " j"]], seconds: Mapping[Any, float]) -> dict[str, float]:
    """Return the rate of every sequence of precisions that ends in float32, with or without TF32 in between.

    `open_at` has the copies that a precision leaves open, which go on to the next; `seconds` is its time per pass.
    """
    ways = [[name, "fp32"] for name in open_at if name != "fp32"] + [["fp32"]]
    ways += [[name, "tf32", "fp32"] for name in ("fp16", "bf16") if {name, "tf32"} <= open_at.keys()]
    rates = {}
    for way in ways:
        left, cost = torch.ones_like(open_at["fp32"]), 0.0
        for name in way:
            cost += float(left.float().mean()) * seconds[name]
            left = left & open_at[name]
        rates[" ".join(way)] = 1 / cost
    return rates


def margin_changes(one: Float[Tensor, "j classes"], other: Float[Tensor, "j classes"]) -> Float[Tensor, " j"]:
    """Return the change of the top-1 margin between two evaluations, which a flip has to overcome."""
    label, gap = top_two(one)
    return (gap - label_margin(other, label)).abs()
