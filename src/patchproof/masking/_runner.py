"""How masked copies are evaluated: so many at once, in this precision, and what happens when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple, TypeVar, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.masking._arithmetic import Pass, passing
from patchproof.masking._images import fill_colour, occlude
from patchproof.types import CheckError, Classifier, InputError, Precision, require_one_of


@dataclass(frozen=True)
class Engine:
    """How masked copies are evaluated: how many at once, how precisely, and from which gap on a label counts.

    A label of a fast pass (any precision but fp32) counts when the top logit leads by at least `tau`; otherwise it is
    decided again in float32. There it must lead by `tau_fp32` to count in a certificate. With `compile`, fast passes
    run through torch.compile, always in whole chunks, so that it compiles once.
    """

    chunk: int = 64
    precision: Precision = "fp32"
    tau: float = 0.0
    tau_fp32: float = 0.0
    compile: bool = False

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise InputError(f"a chunk holds at least one masked copy, not {self.chunk}")
        if not (self.tau >= 0 and self.tau_fp32 >= 0):
            raise InputError(f"τ cannot be negative: tau={self.tau}, tau_fp32={self.tau_fp32}")
        require_one_of("precision", self.precision, get_args(Precision))


Result = TypeVar("Result")

PARTS = (1, 4)
"""Batches of fixed sizes are whole chunks, or these parts of one."""


class Copies(NamedTuple):
    """Masked copies to evaluate: copy j is image `image[j]` under masks `first[j]` and `second[j]` together."""

    image: Int64[Tensor, " j"]
    first: Int64[Tensor, " j"]
    second: Int64[Tensor, " j"]

    def to(self, device: torch.device) -> Copies:
        return self if self.image.device == device else Copies(*torch.stack(self).to(device, non_blocking=True))

    def part(self, start: int, size: int) -> Copies:
        return Copies(*(t[start : start + size] for t in self))


@dataclass
class Audit:
    """What float32 said of the fast labels it had to decide again: how many, and how far a gap had been off."""

    redone: int = 0
    largest_change: float = 0.0

    def add(self, label: Tensor, gap: Tensor, sure_label: Tensor, sure_gap: Tensor, *, tau: float) -> None:
        """Fast labels and gaps beside those of float32. Each change lies below τ, or τ was measured on copies too
        unlike this one."""
        self.redone += len(gap)
        change = (gap - torch.where(sure_label == label, sure_gap, -sure_gap)).abs()
        change = change[change.isfinite()]  # an overflow or NaN never counts, so it needs no τ
        self.largest_change = max(self.largest_change, *change.tolist(), 0.0)
        if self.largest_change > tau:
            raise CheckError(
                f"the gap between two logits changed by {self.largest_change:.3g} between the fast precision and "
                f"float32, more than the τ of {tau:.3g} that was measured before; use a higher --precision (fp32 is "
                "always sound), and another --output"
            )


class InChunks:
    """Something that works in chunks, which halve for good when memory runs out."""

    chunk: int

    def within_memory(self, work: Callable[[], Result]) -> Result:
        """Do it, and again in smaller chunks as long as memory runs out."""
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if self.chunk == 1 or not out_of_memory(error):
                    raise
            self.chunk = max(1, self.chunk // 2)  # outside the handler: the error holds on to the failed pass's tensors
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


@dataclass
class Runner(InChunks):
    """One classifier under one engine. `chunk` starts as the engine's and halves when memory runs out; `passes` counts
    the masked copies evaluated."""

    classifier: Classifier
    engine: Engine
    chunk: int = field(init=False)
    audit: Audit = field(default_factory=Audit)
    passes: int = 0

    def __post_init__(self) -> None:
        self.chunk = self.engine.chunk
        self.refresh()

    def refresh(self) -> None:
        """Have the classifier's fast form take over its weights, however they were changed."""
        refresh = getattr(self.classifier, "refresh", None)
        if refresh is not None:
            refresh()

    def logits(
        self,
        images: Float[Tensor, "j c h w"],
        *,
        precision: Precision | None = None,
        network: Callable[..., Pass] | None = None,
    ) -> Tensor:
        """F of at most one chunk of images, in the engine's precision or another.

        `network` is `passing` of the classifier, for those who call this many times and remember its answers.
        """
        precision, network = precision or self.engine.precision, network or partial(passing, self.classifier)
        if not self.fixed(images):
            return network(precision=precision)(images)
        shape = self.shape(len(images))
        compiled = self.engine.compile and precision == self.engine.precision and shape == self.chunk
        return network(precision=precision, compiled=compiled)(padded(images, shape))[: len(images)]

    def fixed(self, images: Tensor) -> bool:
        """On a GPU, or compiled, batches have few sizes: for every new one kernels are chosen anew, or compiled."""
        return images.is_cuda or self.engine.compile

    def shape(self, count: int) -> int:
        """The size of the next batch of `count` that are left: the largest that they fill by half."""
        sizes = [max(1, self.chunk // part) for part in PARTS]
        return next((size for size in sizes if 2 * count >= size), sizes[-1])

    @torch.no_grad()
    def evaluate(
        self,
        images: Float[Tensor, "b c h w"],
        keep: Bool[Tensor, "n 1 h w"],
        copies: Copies,
        read: Callable[[Tensor, Tensor], Tensor],
        *,
        precision: Precision | None = None,
    ) -> Tensor:
        """read(F(x_b ⊙ m0 ⊙ m1), b) for every copy, a chunk at a time; the device is not waited for."""
        fill = fill_colour(self.classifier, images)
        copies = copies.to(images.device)
        network = cache(partial(passing, self.classifier))

        def answer(start: int, size: int) -> Tensor:
            part = copies.part(start, size)
            masked = occlude(images[part.image], keep[part.first] & keep[part.second], fill)
            return read(self.logits(masked, precision=precision, network=network), part.image)

        answers = self.in_chunks(len(copies.image), answer, fixed=self.fixed(images))
        self.passes += len(copies.image)
        return torch.cat(answers) if answers else images.new_zeros(0)

    def in_chunks(self, count: int, answer: Callable[[int, int], Tensor], *, fixed: bool) -> list[Tensor]:
        """answer(start, size) for consecutive chunks of `count` things, in smaller ones once memory has run out."""

        def next_chunk(start: int) -> tuple[int, Tensor]:
            size = min(self.shape(count - start) if fixed else self.chunk, count - start)
            return size, answer(start, size)

        answers: list[Tensor] = []
        start = 0
        while start < count:
            size, found = self.within_memory(partial(next_chunk, start))
            answers.append(found)
            start += size
        return answers


def out_of_memory(error: BaseException) -> bool:
    """CUDA has an error of its own; its libraries and the CPU's allocator only say so."""
    said = any(words in str(error) for words in ("can't allocate memory", "ALLOC_FAILED", "CUDA error: out of memory"))
    return said or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def padded(images: Tensor, size: int) -> Tensor:
    """The images, and the last one again and again until there are `size` of them; channels last stays so."""
    if len(images) >= size:
        return images
    again = torch.zeros(size - len(images), dtype=torch.int64, device=images.device)
    return torch.cat([images, images[-1:].detach()[again]])  # indexed, as `expand` would lose the layout
