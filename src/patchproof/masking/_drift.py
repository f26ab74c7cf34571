"""How far masked copies' logits change between evaluations and precisions, and which way to a label is the fastest."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from patchproof.masking._evaluator import PARTS, Copies, Evaluator
from patchproof.masking._logits import label_margin, top_two
from patchproof.types import CheckError, Precision, PrecisionChoice

SAFETY = 8.0
"""τ of float32 is this many times the largest change of a margin seen between float32 evaluations."""

FAST_SAFETY = {512: 6.5, 2048: 5.5}
"""The same between a fast precision and float32, by the number of copies compared, and of the mean of the largest
hundredth of the changes, which varies less from sample to sample than the largest (docs/decisions/0003-tau.md)."""

COPIES = 512
"""Masked copies that evaluations are compared on, each of another image as far as there are so many."""

ALONE = 16
"""So many of them are also evaluated one at a time."""

REFUSED_DRIFT = 1e-2
"""A float32 logit that changes by more than this share of the largest |logit| is no rounding: the model is refused."""

MUCH_AGAIN = 0.2
"""A precision that decides a larger share of the labels again is worth a word."""


@dataclass(frozen=True)
class Drift:
    """How far logits and margins change between evaluations of the same masked copies.

    `repeated` and `batching` are the largest change of a logit, evaluated again and in other batches, `gap` that of the
    top-1 margin in float32. `changes` are those between another precision and float32 (the mean of the largest
    hundredth), for the precisions whose logits are finite; `again` is the share of the copies that each decides again.
    `labels_per_second` counts those passes in, for every sequence of precisions that a label may go through. `scale` is
    the largest |logit|, `copies` the number of masked copies compared.
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
        """The smallest change that is assumed whatever was measured: 8 units in the last place of the largest logit."""
        return 8 * torch.finfo(torch.float32).eps * self.scale

    @property
    def tau_fp32(self) -> float:
        """A float32 margin this large has the same sign in any batch."""
        return SAFETY * max(self.gap, self.bound)

    def tau(self, precision: str) -> float:
        """A margin this large in `precision` is one of at least τ(fp32) in float32, where every label is decided."""
        if precision == "fp32":
            return 0.0
        compared = max(self.copies, min(FAST_SAFETY))
        return self.tau_fp32 + FAST_SAFETY[max(n for n in FAST_SAFETY if n <= compared)] * self.changes[precision]

    def fastest(self, precision: PrecisionChoice) -> str:
        """The fastest sequence of precisions that begins with this one; with `auto`, of all."""
        rates = self.labels_per_second
        ways = [way for way in rates if precision in ("auto", way.split()[0])]
        first = "fp32" if precision == "auto" else precision
        return max(ways, key=lambda way: rates[way]) if ways else " ".join(dict.fromkeys([first, "fp32"]))

    def remark(self, precision: PrecisionChoice) -> str:
        """Which precision `auto` takes and why, or what speaks against the one asked for; else nothing."""
        best, own = self.fastest("auto"), self.fastest(precision)
        rates = {way.split()[0]: self.labels_per_second[self.fastest(way.split()[0])] for way in self.labels_per_second}  # type: ignore[arg-type]
        again = self.again.get(own.split()[0], 0.0)
        if precision == "auto" and rates:
            shown = [f"{name} {rate:,.0f} ({self.again[name]:.0%} decided again)" for name, rate in rates.items()]
            return f"precision {best.split()[0]}; labels per second: {', '.join(shown)}"
        if again <= MUCH_AGAIN:
            return ""
        better = f"{best.split()[0]} would be faster" if best != own and rates else "auto takes the fastest"
        return f"{precision} decides {again:.0%} of the labels again; {better}"


def measure_drift(
    evaluator: Evaluator,
    images: Float[Tensor, "b c h w"],
    keep: Tensor,
    copies: Copies,
    precisions: Sequence[Precision] = (),
) -> Drift:
    """Logits in whole chunks, the copies in mixed positions; some of them again, and one at a time; and all of them in
    smaller batches. Then those of each of the precisions, compared with these, and on a GPU timed."""
    count = len(copies.image)
    size = max(evaluator.chunk, count)
    mixed = (torch.arange(size) % count)[torch.randperm(size, generator=torch.Generator().manual_seed(0))]
    mixed = mixed.to(images.device)
    every, some = torch.arange(count, device=images.device), mixed[: max(evaluator.chunk, min(count, COPIES))]
    if evaluator.fixed(images):
        smaller = max(1, evaluator.chunk // PARTS[-1])
    else:
        smaller = max(2, min(evaluator.chunk, count) // 2 + 1)  # the last batch is then ragged

    def logits(rows: Tensor, precision: Precision, largest: int | None = None) -> Tensor:
        return evaluator.evaluate(
            images, keep, copies.chosen(rows), lambda x, _: x, precision=precision, largest=largest
        )

    whole, again = logits(mixed, "fp32"), logits(some, "fp32")
    wrong = int((~torch.isfinite(whole)).sum())
    if wrong:
        raise CheckError(
            f"{wrong} of {whole.numel()} logits are NaN or infinite; check the weights and that images are scaled to "
            "[0, 1]"
        )
    small, alone = logits(every, "fp32", smaller), logits(every[:ALONE], "fp32", 1)
    compared = [(again, whole[: len(some)]), (whole, small[mixed]), (alone, small[: len(alone)])]
    drift = Drift(
        repeated=_largest(again - whole[: len(some)]),
        batching=max(_largest(whole - small[mixed]), _largest(alone - small[: len(alone)])),
        gap=max(_largest(margin_changes(one, other)) for one, other in compared),
        scale=_largest(whole),
        copies=count,
    )
    _refuse(drift)
    gaps, changes = {"fp32": top_two(small)[1]}, {}
    for precision in precisions:
        fast, fast_small = logits(mixed, precision), logits(every, precision, smaller)
        if precision != "fp32" and bool(fast.isfinite().all() & fast_small.isfinite().all()):
            found = torch.cat([margin_changes(fast, whole), margin_changes(fast_small, small)])
            changes[str(precision)] = float(found.topk(max(1, len(found) // 100)).values.mean())
            gaps[precision] = top_two(fast_small)[1]
    drift = replace(drift, changes=changes)
    open_at = {name: gap < drift.tau(name) for name, gap in gaps.items()}
    shares = {name: float(left.float().mean()) for name, left in open_at.items() if name in precisions}
    if not images.is_cuda:
        return replace(drift, again=shares)
    torch.cuda.synchronize(images.device)
    seconds = {}
    for name in gaps:
        started = time.perf_counter()
        logits(some, name)  # type: ignore[arg-type]
        torch.cuda.synchronize(images.device)
        seconds[name] = (time.perf_counter() - started) / len(some)
    return replace(drift, again=shares, labels_per_second=labels_per_second(open_at, seconds))


def labels_per_second(open_at: Mapping[str, Bool[Tensor, " j"]], seconds: Mapping[str, float]) -> dict[str, float]:
    """Of every sequence of precisions that ends in float32, with TF32 between a half precision and that or not: a copy
    goes on as long as it is open, and each precision costs its seconds per pass."""
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
    """Change of the top-1 margin between two evaluations: what a flip has to overcome."""
    label, gap = top_two(one)
    return (gap - label_margin(other, label)).abs()


def _largest(values: Tensor) -> float:
    return float(values.abs().amax()) if values.numel() else 0.0


def _refuse(drift: Drift) -> None:
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
