"""Executors do the work of a run: in this process, or in those that `torchrun` or `accelerate launch` has started.

A run is cut into numbered pieces. An executor has each piece done once, and yields the answers in order.
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
"""Subtracted from the heartbeat count of a process that has finished without an error."""

UNREACHABLE = (torch.distributed.DistError, ConnectionError)
CONTINUE = "whatever was finished is on disk: resume on any number of processes"

Job = Callable[[Iterator[int]], Iterator[tuple[int, Any]]]
"""Takes numbers of pieces, one at a time, and yields (number, answer) in the same order.

An answer has a method `dump()` that returns it as text, to send it to another process.
"""


@runtime_checkable
class Executor(Protocol):
    """Does pieces of work. The main process (rank 0) gets all answers, and only it writes to disk."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def at_work(self) -> Any:
        """Context manager in which the processes notice if one of them fails."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes on the main process, its own first; an empty list on the others."""

    def share(self, value: Any = None) -> Any:
        """Return the main process's value on every process."""

    def run(self, job: Job, pieces: range, load: Callable[[str], Any]) -> Iterator[Any]:
        """Yield the answers in order on the main process; on the others, work until no piece is left."""


class InProcess:
    """Does all pieces in this process."""

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
    """Shares the pieces among the processes of `torchrun` or `accelerate launch`, on one machine or many.

    Each process makes the same calls. They exchange values through the launcher's key-value store, without collective
    operations. A process claims a piece when it is about to begin it, so a slow process claims fewer pieces.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        if store is None:
            store, rank, size = _joined()
        self.rank, self.size, self.store = rank, size, store
        self._run = self._calls = 0
        self._beats: dict[int, tuple[int, float]] = {}

    def gather(self, value: Any) -> list[Any]:
        key = self._fresh()
        if self.rank:
            self._ask("set", f"{key}/{self.rank}", json.dumps(value))
            return []
        return [value, *(json.loads(self._awaited(f"{key}/{rank}")) for rank in range(1, self.size))]

    def share(self, value: Any = None) -> Any:
        key = self._fresh()
        if self.rank:
            return json.loads(self._awaited(key))
        self._ask("set", key, json.dumps(value))
        return value

    def run(self, job: Job, pieces: range, load: Callable[[str], Any]) -> Iterator[Any]:
        key, own, following = self._fresh(), dict[int, Any](), pieces.start

        def answer_to(number: int) -> Any:
            if number in own:
                return own.pop(number)
            text = self._awaited(f"{key}/{number}")
            self._ask("delete_key", f"{key}/{number}")
            return load(text)

        for number, answer in job(self._claims(key, pieces)):
            if self.rank:
                self._ask("set", f"{key}/{number}", answer.dump())
                continue
            own[number] = answer
            while following < pieces.stop and (following in own or self._ask("check", [f"{key}/{following}"])):
                yield answer_to(following)
                following += 1
        if not self.rank:
            yield from map(answer_to, range(following, pieces.stop))

    def _fresh(self) -> str:
        """Return a key that no earlier call has used, the same on every process."""
        self._calls += 1
        return f"{self._run}/{self._calls}"

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store, which lives in the main process."""
        try:
            return getattr(self.store, method)(*arguments)
        except UNREACHABLE as error:
            reason = f"process {self.rank} of {self.size} cannot reach the main process any more"
            raise CheckError(f"{reason}; {CONTINUE}") from error

    def _claims(self, key: str, pieces: range) -> Iterator[int]:
        """Claim pieces one by one until none is left."""
        while (number := pieces.start + self._ask("add", f"{key}/claimed", 1) - 1) < pieces.stop:
            yield number

    def _awaited(self, key: str) -> str:
        """Wait until another process has set the key, and return its text."""
        while not self._ask("check", [key]):
            self._require_alive()
            time.sleep(POLL_SECONDS)
        return str(self._ask("get", key).decode())

    def _require_alive(self) -> None:
        """Raise if a process has failed, or has neither finished nor shown a recent heartbeat."""
        key = f"{self._run}/failed"
        if self._ask("check", [key]):
            failed = json.loads(self._ask("get", key))
            raise CheckError(f"process {failed['rank']} of {self.size} has failed: {failed['reason']} ({CONTINUE})")
        for rank in set(range(self.size)) - {self.rank}:
            count, now = self._ask("add", f"{self._run}/beat/{rank}", 0), time.monotonic()
            before, since = self._beats.setdefault(rank, (count, now))
            if count != before:
                self._beats[rank] = count, now
            elif count >= 0 and now - since > DEAD_AFTER_SECONDS:
                raise CheckError(f"process {rank} of {self.size} has not answered for {now - since:.0f} s; {CONTINUE}")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._run = self._ask("add", f"runs/{self.rank}", 1)
        self._calls = 0  # so that the keys agree, even if the processes left the last run at different points
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
    with suppress(*UNREACHABLE):  # if the main process is gone, this one notices when it next needs it
        while not over.wait(BEAT_SECONDS):
            store.add(key, 1)


@cache
def _joined() -> tuple[Store, int, int]:
    """Join the launcher's store; return it with the rank of this process and the number of processes."""
    rank, size = environment_number("RANK", 0), environment_number("WORLD_SIZE", 1)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"WORLD_SIZE is {size}, but {' and '.join(missing)} are not set; start with torchrun")
    return next(rendezvous("env://", rank, size, timeout=timedelta(minutes=5)))


def environment_number(name: str, default: int) -> int:
    """Read a whole number that a launcher puts into the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise InputError(f"{name} must be a whole number, not {text!r}; start with torchrun, or unset it")
    return int(text)


@cache
def launched() -> Executor:
    """Return the executor for the processes that a launcher has started; without a launcher, for this process."""
    return Torchrun() if environment_number("WORLD_SIZE", 1) > 1 else InProcess()


def local_rank() -> int | None:
    """Return the number of this process on its machine, and so of its GPU; None without a launcher."""
    return environment_number("LOCAL_RANK", 0) if environment_number("WORLD_SIZE", 1) > 1 else None


def default_workers() -> int:
    """Number of threads that decode images: one per core, at most 16, shared among the processes of the machine."""
    return max(1, min(16, (os.cpu_count() or 2) // environment_number("LOCAL_WORLD_SIZE", 1)))
