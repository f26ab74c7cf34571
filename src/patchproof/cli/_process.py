"""The process of a command: kept memory, threads that sleep while they wait, and signals that stop the command."""

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
"""Numbers of two parameters of `mallopt`, from glibc's malloc.h."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def keep_freed_memory() -> None:
    """Keep freed memory for the next pass, unless the environment configures glibc's allocator itself.

    By default glibc returns large blocks to the system at once, and the system hands them out again page by page,
    zeroed: 28 to 45% of the time of a network on a CPU (benchmarks/allocator.py). The process then holds its memory
    until it ends, which suits a command but not a library. Without glibc nothing happens.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_MAX, 0)


def sleep_while_waiting() -> None:
    """Let torch's threads sleep while they wait for each other, unless the environment sets another policy.

    They wait after every layer. By default they spin, even on a core that the thread they wait for needs because
    another process occupies its own. OpenMP reads the variable when torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Stop:
    """The signal that asked the command to stop, if any, and the folder of its run once that is known.

    A signal raises KeyboardInterrupt. While `patient`, the first one only sets `asked`.
    """

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
        """Inside, the first signal waits until the work looks at `asked`, where stopping loses nothing."""
        self.patient = True
        try:
            yield
        finally:
            self.patient = False

    def ignore_further(self) -> None:
        """Ignore further SIGTERMs while the command ends."""
        if signal.getsignal(signal.SIGTERM) == self.hear:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


STOP = Stop()
