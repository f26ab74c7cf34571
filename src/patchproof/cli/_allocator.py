"""Memory between the passes of a network on a CPU."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Keep freed memory for the next pass, unless the environment has settings of its own for glibc's allocator.

    By default glibc gives large blocks back at once, and the system hands them out again page by page, zeroed: 28 to
    45% of the time of a network on a CPU (benchmarks/allocator.py). A process then holds on to its memory until it
    ends, so this is for commands and not for a library. Without glibc nothing happens.
    """
    own = any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" and not own else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_MAX, 0)
