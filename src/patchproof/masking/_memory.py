"""How many masked copies fit into one pass."""

from __future__ import annotations

import torch

from patchproof.types import Size

MOST_ON_CPU = 512


def default_batch(image_size: Size, device: torch.device) -> int:
    """Return a chunk size that keeps the device busy without much memory: a power of two, smaller for larger images."""
    budget, most = (2_500_000, MOST_ON_CPU) if device.type == "cpu" else (80_000_000, 2048)
    fitting = max(1, min(most, budget // (3 * image_size[0] * image_size[1])))
    return 1 << (fitting.bit_length() - 1)


def out_of_memory(error: BaseException) -> bool:
    """True for an error that means lack of memory: CUDA's libraries and the CPU's allocator only say so in words."""
    said = any(words in str(error) for words in ("can't allocate memory", "ALLOC_FAILED", "CUDA error: out of memory"))
    return said or isinstance(error, (torch.OutOfMemoryError, MemoryError))
