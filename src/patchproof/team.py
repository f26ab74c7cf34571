"""Several processes, one job: pieces of work are claimed one at a time, and their answers gathered in order.

The processes meet in the key-value store of `torchrun` or `accelerate launch`, on one machine or many. There are no
collective operations, so a slow process holds nobody back; it just claims fewer pieces.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from patchproof.types import CheckError, InputError, PatchproofError

BEAT_SECONDS = 2.0
DEAD_AFTER_SECONDS = 60.0
POLL_SECONDS = 0.05
GONE = 2**40
"""Subtracted from the signs of life of a process that has finished in order."""

UNREACHABLE = (torch.distributed.DistError, ConnectionError)
CONTINUE = "whatever was finished is on disk: continue with --resume on any number of processes"


@dataclass
class Team:
    """This process, number `rank` of `size`. Process 0 is the main one: it alone writes."""

    rank: int = 0
    size: int = 1
    store: Store | None = None
    dead_after: float = DEAD_AFTER_SECONDS
    answers: dict[int, str] = field(default_factory=dict)
    _beats: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its machine: which GPU to take."""
        return int(os.environ.get("LOCAL_RANK", "0")) if self.size > 1 else 0

    def claims(self, pieces: range) -> Iterator[int]:
        """Numbers of pieces that nobody else works on, until there are none left."""
        if self.store is None:
            yield from pieces
            return
        while True:
            with self._reaching("claim work from"):
                number = pieces.start + self.store.add("claimed", 1) - 1
            if number >= pieces.stop:
                return
            yield number

    def deliver(self, piece: int, answer: str) -> None:
        """Hand in the answer to a piece; the main process gathers it."""
        if self.store is None or self.is_main:
            self.answers[piece] = answer
            return
        with self._reaching("hand results to"):
            self.store.set(f"answer/{piece}", answer)

    def gathered(self, pieces: range, *, wait: bool = False) -> Iterator[str]:
        """On the main process: answers in order, as far as they are there; all of them with `wait`."""
        for piece in pieces:
            answer = self.answers.pop(piece, None) or self._fetched(piece, wait=wait)
            if answer is None:
                return
            yield answer

    def _fetched(self, piece: int, *, wait: bool) -> str | None:
        key = f"answer/{piece}"
        if self.store is None or not self._there(key, wait=wait):
            return None
        answer = self.store.get(key).decode()
        self.store.delete_key(key)
        return answer

    def tell(self, key: str, value: Any) -> None:
        """Leave word for the other processes."""
        if self.store is not None:
            with self._reaching("talk to"):
                self.store.set(f"word/{key}", json.dumps(value))

    def told(self, key: str) -> Any:
        """What a process has left under this key; waits until it has."""
        if self.store is None:
            raise InputError("a process on its own is told nothing")
        with self._reaching("hear from"):
            self._there(f"word/{key}", wait=True)
            return json.loads(self.store.get(f"word/{key}"))

    def _there(self, key: str, *, wait: bool) -> bool:
        assert self.store is not None
        while not self.store.check([key]):
            if not wait:
                return False
            self._require_alive()
            time.sleep(POLL_SECONDS)
        return True

    def _require_alive(self) -> None:
        """No process has failed, and every one that has not finished has shown a sign of life lately."""
        assert self.store is not None
        if self.store.check(["failed"]):
            failed = json.loads(self.store.get("failed"))
            raise CheckError(f"process {failed['rank']} of {self.size} has failed: {failed['reason']} ({CONTINUE})")
        for rank in set(range(self.size)) - {self.rank}:
            count, now = self.store.add(f"beat/{rank}", 0), time.monotonic()
            before, since = self._beats.setdefault(rank, (count, now))
            if count != before:
                self._beats[rank] = count, now
            elif count >= 0 and now - since > self.dead_after:
                raise CheckError(
                    f"process {rank} of {self.size} has not answered for {self.dead_after:.0f} s; {CONTINUE}"
                )

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
        """While this lasts, the others can see that this process lives; and if it fails, they hear of it."""
        if self.store is None:
            yield
            return
        over = threading.Event()
        beating = threading.Thread(target=_beat, args=(self.store.clone(), self.rank, over), daemon=True)
        beating.start()
        try:
            yield
        except BaseException as error:
            reason = str(error) if isinstance(error, PatchproofError) else type(error).__name__
            with suppress(*UNREACHABLE):
                self.store.set("failed", json.dumps({"rank": self.rank, "reason": reason}))
            raise
        finally:
            over.set()
            beating.join()
        with suppress(*UNREACHABLE):
            self.store.add(f"beat/{self.rank}", -GONE)


def _beat(store: Store, rank: int, over: threading.Event) -> None:
    """A sign of life now and then."""
    with suppress(*UNREACHABLE):  # the main process is gone, and this one will notice when it next needs it
        while not over.wait(BEAT_SECONDS):
            store.add(f"beat/{rank}", 1)


def join_team() -> Team:
    """The processes that `torchrun` or `accelerate launch` has started; otherwise a team of one."""
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise InputError(f"RANK and WORLD_SIZE must be numbers: {error}; start with torchrun") from error
    if size <= 1:
        return Team()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"WORLD_SIZE is {size}, but {' and '.join(missing)} are not set; start with torchrun")
    store, rank, size = next(rendezvous("env://", rank, size, timeout=timedelta(minutes=5)))
    return Team(rank, size, store)
