"""How masked copies are evaluated: in which arithmetic, how many at once, and what happens when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from patchproof.settings import Engine
from patchproof.types import InputError, Precision, Size

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Measured(Engine):
    """An engine with its τ, measured by `check_classifier` or taken from a run that did.

    A label of a fast pass (any precision but fp32) counts when the top logit leads by at least `tau`. Otherwise it is
    decided again: in TF32, if there is a `tau_tf32`, where it must lead by that, and at last in float32, where it must
    lead by `tau_fp32` to count in a certificate.
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
        """The precisions that a label goes through, and the gap at which it goes no further."""
        fast = [] if self.precision == "fp32" else [(self.fast, self.tau)]
        between: list[tuple[Precision, float]] = [] if self.tau_tf32 is None else [("tf32", self.tau_tf32)]
        return [*fast, *between, ("fp32", 0.0)]


MOST_ON_CPU = 512


def default_batch(image_size: Size, device: torch.device) -> int:
    """As many copies as keep the device busy without much memory: fewer when images are larger; a power of two."""
    budget, most = (2_500_000, MOST_ON_CPU) if device.type == "cpu" else (80_000_000, 2048)
    fitting = max(1, min(most, budget // (3 * image_size[0] * image_size[1])))
    return 1 << (fitting.bit_length() - 1)


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


def out_of_memory(error: BaseException) -> bool:
    """CUDA has an error of its own; its libraries and the CPU's allocator only say so."""
    said = any(words in str(error) for words in ("can't allocate memory", "ALLOC_FAILED", "CUDA error: out of memory"))
    return said or isinstance(error, (torch.OutOfMemoryError, MemoryError))
