"""Labels and margins of masked copies: when a label counts (τ), and how far fast margins were off (the audit)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.settings import Engine
from patchproof.types import InputError, Precision, kind_of

SHARES = 10  # the audit counts margin changes up to 10%, 20%, …, 100% of what τ allows


def top_two(logits: Float[Tensor, "j classes"]) -> tuple[Int64[Tensor, " j"], Float[Tensor, " j"]]:
    """Return the top-1 label of each copy (the smallest of tied ones) and its margin over the runner-up."""
    label = logits.argmax(dim=1)
    return label, label_margin(logits, label)


def label_margin(logits: Float[Tensor, "j *k classes"], labels: Int64[Tensor, " j"]) -> Float[Tensor, " j *k"]:
    """Return the label's logit minus the largest other logit: negative when another label wins."""
    index = labels.view(-1, *[1] * (logits.ndim - 1)).expand(*logits.shape[:-1], 1)
    rest = logits.scatter(-1, index, -torch.inf).amax(dim=-1)
    return logits.gather(-1, index)[..., 0] - rest


def label_range(labels: Int64[Tensor, " b"]) -> tuple[int, int] | None:
    """Return the smallest and the largest label, read once so that later checks need not wait for the device."""
    if not len(labels):
        return None
    smallest, largest = torch.stack(labels.aminmax()).tolist()
    return smallest, largest


def require_classes(labels: tuple[int, int] | None, classes: int) -> None:
    """Refuse labels that are no output of the classifier."""
    if labels is not None and not 0 <= labels[0] <= labels[1] < classes:
        raise InputError(
            f"labels run from {labels[0]} to {labels[1]}, but the classifier has the outputs 0 to {classes - 1}"
        )


def require_labels(labels: Any, count: int, *, classes: int | None = None) -> None:
    """Refuse anything but one int64 label per image and, if `classes` is given, labels that the classifier lacks."""
    if not (isinstance(labels, Tensor) and labels.shape == (count,) and labels.dtype == torch.int64):
        raise InputError(
            f"labels must be a tensor of one int64 number for each of the {count} images, not {kind_of(labels)}"
        )
    if classes is not None:
        require_classes(label_range(labels), classes)


@dataclass(frozen=True, kw_only=True)
class Measured(Engine):
    """An engine with its τ, measured by `check_classifier` or taken from a run that did.

    A label of a fast pass (any precision but fp32) counts if its margin is at least `tau`. Otherwise it is decided
    again: in TF32 if there is a `tau_tf32`, where its margin must be at least that, and finally in float32. A float32
    margin must be at least `tau_fp32` to count in a certificate.
    """

    tau: float
    tau_fp32: float
    tau_tf32: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision == "auto" or self.compile == "auto":
            raise InputError("a measured engine has a precision and is compiled or not; `auto` is for Engine")
        if not (self.tau >= 0 and self.tau_fp32 > 0):
            raise InputError(f"tau cannot be negative and tau_fp32 must be above 0, not {self.tau} and {self.tau_fp32}")
        if self.tau_tf32 is not None and not self.tau_tf32 >= self.tau_fp32:
            raise InputError(f"tau_tf32 must be at least tau_fp32 ({self.tau_fp32}), not {self.tau_tf32}")
        if self.precision != "fp32" and self.tau == 0:
            raise InputError(f"{self.precision} labels need a τ above 0 to count; take it from check_classifier")

    @property
    def steps(self) -> list[tuple[Precision, float]]:
        """The precisions in which a label is decided, in order, and the margin that is decisive in each."""
        fast = [] if self.precision == "fp32" else [(self.fast, self.tau)]
        between: list[tuple[Precision, float]] = [] if self.tau_tf32 is None else [("tf32", self.tau_tf32)]
        return [*fast, *between, ("fp32", 0.0)]


def decided(margin: Float[Tensor, "*j"], tau: float) -> Bool[Tensor, "*j"]:
    """True where the margin is at least tau; an infinite margin is an overflow and never counts."""
    return (margin >= tau) & margin.isfinite()


@dataclass
class Redone:
    """Labels decided again: how many in each `step`, the largest change of a margin between two steps, and how many
    changes (`shares`) were up to 10%, 20%, …, 100% of what τ allows."""

    steps: dict[str, int] = field(default_factory=Counter)
    largest_change: float = 0.0
    shares: list[int] = field(default_factory=lambda: [0] * SHARES)

    def add(self, other: Redone) -> None:
        steps = dict(Counter(self.steps) + Counter(other.steps))
        self.shares = [a + b for a, b in zip(self.shares, other.shares, strict=True)]
        self.steps = steps  # only now: nothing is added if either sum fails
        self.largest_change = max(self.largest_change, other.largest_change)


@dataclass
class Audit:
    """Fast labels that were decided again, by the image's row in its batch; `exceeded` are the rows in which a margin
    changed by more than τ allows, because τ was measured on copies too unlike these."""

    redone: dict[int, Redone] = field(default_factory=lambda: defaultdict(Redone))
    exceeded: set[int] = field(default_factory=set)

    def compare(self, rows: Tensor, change: Tensor, allowed: float) -> float | None:
        """Record the changes of margins between two steps; return the largest if it is more than what is allowed."""
        known = change.isfinite()  # an overflow or NaN never counts, so it needs no τ
        rows, change = rows[known], change[known]
        for row, size in zip(rows.tolist(), change.tolist(), strict=True):
            redone = self.redone[row]
            redone.largest_change = max(redone.largest_change, size)
            redone.shares[min(SHARES - 1, int(SHARES * size / allowed))] += 1
        above = change > allowed
        self.exceeded.update(rows[above].tolist())
        return float(change[above].amax()) if bool(above.any()) else None
