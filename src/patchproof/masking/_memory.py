"""How many masked copies fit into one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from patchproof.types import Size

MOST_ON_CPU = 512

BYTES_PER_PIXEL = 500
"""Memory for a masked copy and its activations: 200 to 500 bytes in float32, from a ViT-B to a VGG-16."""


def default_batch(image_size: Size, device: torch.device) -> int:
    """Return a chunk size that keeps the device busy without much memory: a power of two, smaller for larger images."""
    budget, most = (2_500_000, MOST_ON_CPU) if device.type == "cpu" else (80_000_000, 2048)
    fitting = max(1, min(most, budget // (3 * image_size[0] * image_size[1])))
    return 1 << (fitting.bit_length() - 1)


def first_batch(wanted: int | Literal["auto"], images: Tensor) -> int:
    """The chunk size to begin with: the wanted one, on a CPU halved until passes of usual networks fit into memory.

    A GPU says that it has too little memory. A system lends more than it has, and kills the process that uses it.
    """
    height, width = map(int, images.shape[2:])
    if wanted == "auto":
        return default_batch((height, width), images.device)
    free = None if images.is_cuda else free_memory()
    while free is not None and wanted > 1 and wanted * BYTES_PER_PIXEL * height * width > free:
        wanted //= 2
    return wanted


def free_memory() -> int | None:
    """Bytes of memory that the machine can still give; None if it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def out_of_memory(error: BaseException) -> bool:
    """True for an error that means lack of memory: CUDA's libraries and the CPU's allocator only say so in words."""
    said = any(words in str(error) for words in ("can't allocate memory", "ALLOC_FAILED", "CUDA error: out of memory"))
    return said or isinstance(error, (torch.OutOfMemoryError, MemoryError))
