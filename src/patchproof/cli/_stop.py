"""Ctrl-C and a scheduler's SIGTERM: work ends at once, or where it can be saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether the command is to end. `asked` is the signal; while it is `patient`, the first one only sets that."""

    def __init__(self) -> None:
        self.asked: int | None = None
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
