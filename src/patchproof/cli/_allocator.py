"""Memory between the passes of a network on a CPU."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""


def keep_freed_memory() -> None:
    """What a pass frees serves the next one.

    By default glibc gives large blocks back at once, and the system hands them out again page by page, zeroed: a third
    to a half of the time of a network on a CPU (benchmarks/allocator.py). Peak memory stays the same, but a process
    holds on to it until it ends, so this is for commands and not for a library. Without glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_MAX, 0)
