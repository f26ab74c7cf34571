"""Who does the work of a run: this process, or the processes that `torchrun` or `accelerate launch` has started.

A run is cut into numbered pieces. An executor has them done, each once, and yields their answers in order.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from patchproof.types import CheckError, InputError, PatchproofError

BEAT_SECONDS = 2.0
DEAD_AFTER_SECONDS = 60.0
POLL_SECONDS = 0.05
GONE = 2**40
"""Subtracted from the heartbeat count of a process that has finished in order."""

UNREACHABLE = (torch.distributed.DistError, ConnectionError)
CONTINUE = "whatever was finished is on disk: resume on any number of processes"


Job = Callable[[Iterator[int]], Iterator[tuple[int, Any]]]
"""From the numbers of pieces, asked for one at a time, to (number, answer) of each in the same order. An answer has a
method `dump()`, its text, in which it travels between processes."""


@runtime_checkable
class Executor(Protocol):
    """Does pieces of work. One process, the main one, gets all answers, and alone writes to disk."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def at_work(self) -> Any:
        """A context: while it lasts, the processes notice when one of them fails."""

    def gather(self, value: Any) -> list[Any]:
        """On the main process the values of all processes, its own first; on the others nothing."""

    def share(self, value: Any = None) -> Any:
        """The main process's value, on every process."""

    def run(self, job: Job, pieces: range, load: Callable[[str], Any]) -> Iterator[Any]:
        """Answers in the order of the pieces on the main process; on the others nothing, once all is done."""


class InProcess:
    """This process, alone."""

    rank, size = 0, 1

    @contextmanager
    def at_work(self) -> Iterator[None]:
        yield

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def share(self, value: Any = None) -> Any:
        return value

    def run(self, job: Job, pieces: range, load: Callable[[str], Any]) -> Iterator[Any]:
        yield from (answer for _, answer in job(iter(pieces)))


class Torchrun:
    """The processes of `torchrun` or `accelerate launch`, on one machine or many, each of which makes the same calls.

    They meet in the launcher's key-value store. A process claims a piece when it is about to begin it, so a slow one
    just claims fewer; there are no collective operations.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        if store is None:
            store, rank, size = _joined()
        self.rank, self.size, self.store = rank, size, store
        self._run = self._calls = 0
        self._beats: dict[int, tuple[int, float]] = {}

    def _fresh(self) -> str:
        """A key that no earlier call has used; every process makes the same calls in a run."""
        self._calls += 1
        return f"{self._run}/{self._calls}"

    def gather(self, value: Any) -> list[Any]:
        key = self._fresh()
        if self.rank:
            with self._reaching("talk to"):
                self.store.set(f"{key}/{self.rank}", json.dumps(value))
            return []
        return [value, *(json.loads(self._awaited(f"{key}/{rank}")) for rank in range(1, self.size))]

    def share(self, value: Any = None) -> Any:
        key = self._fresh()
        if self.rank:
            return json.loads(self._awaited(key))
        with self._reaching("talk to"):
            self.store.set(key, json.dumps(value))
        return value

    def run(self, job: Job, pieces: range, load: Callable[[str], Any]) -> Iterator[Any]:
        key, own, following = self._fresh(), {}, pieces.start
        for number, answer in job(self._claims(key, pieces)):
            if self.rank:
                with self._reaching("hand results to"):
                    self.store.set(f"{key}/{number}", answer.dump())
                continue
            own[number] = answer
            while following < pieces.stop and (following in own or self.store.check([f"{key}/{following}"])):
                yield own.pop(following, None) or load(self._awaited(f"{key}/{following}", last=True))
                following += 1
        if not self.rank:
            for number in range(following, pieces.stop):
                yield own.pop(number, None) or load(self._awaited(f"{key}/{number}", last=True))

    def _claims(self, key: str, pieces: range) -> Iterator[int]:
        """Numbers of pieces that nobody else works on, until there are none left."""
        while True:
            with self._reaching("claim work from"):
                number = pieces.start + self.store.add(f"{key}/claimed", 1) - 1
            if number >= pieces.stop:
                return
            yield number

    def _awaited(self, key: str, *, last: bool = False) -> str:
        """What another process has written there, when it has; removed if this is the `last` that asks for it."""
        with self._reaching("hear from"):
            while not self.store.check([key]):
                self._require_alive()
                time.sleep(POLL_SECONDS)
            text = self.store.get(key).decode()
        if last:
            self.store.delete_key(key)
        return text

    def _require_alive(self) -> None:
        """Raise if a process has failed, or has neither finished nor shown a heartbeat lately."""
        key = f"{self._run}/failed"
        if self.store.check([key]):
            failed = json.loads(self.store.get(key))
            raise CheckError(f"process {failed['rank']} of {self.size} has failed: {failed['reason']} ({CONTINUE})")
        for rank in set(range(self.size)) - {self.rank}:
            count, now = self.store.add(f"{self._run}/beat/{rank}", 0), time.monotonic()
            before, since = self._beats.setdefault(rank, (count, now))
            if count != before:
                self._beats[rank] = count, now
            elif count >= 0 and now - since > DEAD_AFTER_SECONDS:
                raise CheckError(f"process {rank} of {self.size} has not answered for {now - since:.0f} s; {CONTINUE}")

    @contextmanager
    def _reaching(self, doing: str) -> Iterator[None]:
        try:
            yield
        except UNREACHABLE as error:
            raise CheckError(
                f"process {self.rank} of {self.size} cannot {doing} the main process any more; {CONTINUE}"
            ) from error

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self._reaching("talk to"):
            self._run = self.store.add(f"runs/{self.rank}", 1)
        self._calls = 0  # processes that left the last run at different points are in step again
        self._beats.clear()
        over, beat = threading.Event(), f"{self._run}/beat/{self.rank}"
        beating = threading.Thread(target=_beat, args=(self.store.clone(), beat, over), daemon=True)
        beating.start()
        try:
            yield
        except BaseException as error:
            reason = str(error) if isinstance(error, PatchproofError) else type(error).__name__
            with suppress(*UNREACHABLE):
                self.store.set(f"{self._run}/failed", json.dumps({"rank": self.rank, "reason": reason}))
            raise
        finally:
            over.set()
            beating.join()
        with suppress(*UNREACHABLE):
            self.store.add(beat, -GONE)


def _beat(store: Store, key: str, over: threading.Event) -> None:
    with suppress(*UNREACHABLE):  # the main process is gone, and this one will notice when it next needs it
        while not over.wait(BEAT_SECONDS):
            store.add(key, 1)


@cache
def _joined() -> tuple[Store, int, int]:
    """The launcher's store, and which process of how many this is."""
    rank, size = environment_number("RANK", 0), environment_number("WORLD_SIZE", 1)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"WORLD_SIZE is {size}, but {' and '.join(missing)} are not set; start with torchrun")
    return next(rendezvous("env://", rank, size, timeout=timedelta(minutes=5)))


def environment_number(name: str, default: int) -> int:
    """A number that a launcher puts into the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(f"{name} must be a whole number, not {text!r}; start with torchrun, or unset it")
    return int(text)


@cache
def launched() -> Executor:
    """The processes that a launcher has started; without one, this process."""
    return Torchrun() if environment_number("WORLD_SIZE", 1) > 1 else InProcess()


def local_rank() -> int | None:
    """Which of the machine's processes, and so which GPU, this is; None without a launcher."""
    return environment_number("LOCAL_RANK", 0) if environment_number("WORLD_SIZE", 1) > 1 else None


def default_workers() -> int:
    """Threads that decode images: one per core, at most 16, shared among the processes of the machine."""
    return max(1, min(16, (os.cpu_count() or 2) // environment_number("LOCAL_WORLD_SIZE", 1)))
