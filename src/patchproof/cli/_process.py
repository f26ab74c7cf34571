"""The process of a command: freed memory, threads that wait, and when Ctrl-C or a scheduler's SIGTERM ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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


def sleep_while_waiting() -> None:
    """Threads of torch that wait for each other sleep, unless the environment has a policy of its own.

    They wait after every layer, and by default they spin, also where the core is needed by the thread they wait for,
    because something else runs on the other one. OpenMP reads the variable when torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Stop:
    """Whether the command is to end. `asked` is the signal; while it is `patient`, the first one only sets that.
    `folder` is that of the run, once it is known."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self.folder: Path | None = None
        self.patient = False

    def listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = self.asked is None, number
        if not (first and self.patient):
            raise KeyboardInterrupt
        os.write(2, b"\nstopping after this step; a second signal stops at once\n")

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Inside, whoever works asks `asked` where a stop loses nothing."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False

    def ignore_further(self) -> None:
        """The command is ending: one more stop from a scheduler changes nothing."""
        if signal.getsignal(signal.SIGTERM) == self.hear:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


STOP = Stop()
