"""Faults on purpose: real commands in processes of their own, killed, starved or misled at a chosen moment.

Importing torch takes seconds, so one process imports everything once and does nothing else; each command is a fork of
it, started in milliseconds. A fork is a process like any other: memory, locks and signal handlers of its own, and
SIGKILL ends it wherever it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds after which a command counts as hanging."""

FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
CAP_DAC_OVERRIDE = 1


@dataclass(frozen=True)
class Fault:
    """What befalls a process from within; what a signal does is up to whoever holds its `Command`."""

    folder: str = ""
    """The folder whose file events are counted."""
    die_at: int | None = None
    """SIGKILL to itself just before this file event (open, rename, remove, mkdir, …) in the folder, counted from 1."""
    file_bytes: int | None = None
    """No file can grow beyond this: a write stops in the middle, as on a full disk."""
    clock: float | None = None
    """Wall-clock time begins here, and goes back an hour with every look at it."""
    powerless: bool = False
    """Root obeys permissions too, as any other user has to."""


class Command:
    """One `patchproof` command on its way."""

    def __init__(self, server: Server, number: int, errors: Path) -> None:
        self.server, self.number, self.errors = server, number, errors

    def send(self, signal_number: int) -> bool:
        """Whether it was still there to get the signal."""
        if self.server.ended(self.number):
            return False
        os.kill(self.number, signal_number)
        return True

    def wait(self) -> int:
        """Its exit code; minus the signal that ended it."""
        return self.server.wait(self.number)

    @property
    def complaint(self) -> str:
        return self.errors.read_text("utf-8", errors="replace")


class Server:
    """The process that has imported everything, and the commands forked from it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self.codes: dict[int, int] = {}
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._heard(timeout=PATIENCE)

    def start(
        self, arguments: list[str], fault: Fault | None = None, environment: dict[str, str] | None = None
    ) -> Command:
        """Begin a command in the current folder. Every process still alive ends with the server."""
        self.started += 1
        errors = self.folder / f"stderr-{self.started}"
        request: dict[str, Any] = {"arguments": arguments, "cwd": str(Path.cwd()), "errors": str(errors)}
        request |= {"fault": asdict(fault or Fault()), "environment": environment or {}}
        assert self.process.stdin
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        self.process.stdin.flush()
        while (word := self._heard(timeout=PATIENCE)).get("began") is None:
            self.codes[word["ended"]] = word["code"]
        return Command(self, word["began"], errors)

    def run(self, arguments: list[str], fault: Fault | None = None) -> tuple[int, str]:
        """The exit code of a command and what it wrote to stderr."""
        command = self.start(arguments, fault)
        return command.wait(), command.complaint

    def ended(self, number: int) -> bool:
        while number not in self.codes and (word := self._heard(timeout=0.0)):
            self.codes[word["ended"]] = word["code"]
        return number in self.codes

    def wait(self, number: int) -> int:
        until = time.monotonic() + PATIENCE
        while number not in self.codes:
            word = self._heard(timeout=max(0.0, until - time.monotonic()))
            if not word:
                os.kill(number, signal.SIGKILL)
                raise TimeoutError(f"a command hung for {PATIENCE:.0f} s")
            self.codes[word["ended"]] = word["code"]
        return self.codes[number]

    def _heard(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        return json.loads(self._line()) if ready else {}

    def _line(self) -> bytes:
        """One byte at a time: a buffer would hide lines from `select`."""
        assert self.process.stdout
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self.process.stdout.fileno(), 1)
            if not byte:
                raise RuntimeError("the process that forks commands has ended")
            line += byte
        return line

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def small_disk(place: Path, *, kilobytes: int) -> Iterator[bool]:
    """A file system of this size at `place`, which `resize_disk` can enlarge; False where none can be mounted."""
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(["mount", *options], capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


def resize_disk(place: Path, *, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(place)], check=True)


def quicken() -> None:
    """τ measured on fewer copies and in smaller batches: those are most of the passes of a run on a few images. The
    commit and the versions in its manifest are looked up once per process."""
    import torch

    from patchproof.defenses import _base
    from patchproof.masking import _checks, _memory, check_classifier
    from patchproof.runs import _manifest, _measure

    torch.set_num_threads(1)
    _memory.MOST_ON_CPU, _measure.MOST_COPIES, _checks.ALONE = 32, 16, 2
    _base.check_classifier = partial(check_classifier, copies=16)
    _manifest.source_commit, _manifest.versions = cache(_manifest.source_commit), cache(_manifest.versions)


def serve() -> None:
    """Fork a process for each request that comes in; tell its number, and later how it ended."""
    import accelerate  # noqa: F401
    import scipy.special  # noqa: F401
    import torch._dynamo  # noqa: F401  (a first optimiser step imports it)
    from PIL import Image

    import patchproof.cli._runs
    import patchproof.training.checkpoint

    Image.init()
    quicken()
    gc.freeze()  # a fork then copies little of this memory
    _tell({"ready": True})
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.005 if running else None)
        if ready:
            line = sys.stdin.buffer.readline()
            if not line:
                break
            number = os.fork()
            if number == 0:
                _become(json.loads(line))
                _call(patchproof.cli.main)
            running.add(number)
            _tell({"began": number})
        for number in list(running):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                running.remove(number)
                _tell({"ended": number, "code": os.waitstatus_to_exitcode(status)})
    for number in running:
        os.kill(number, signal.SIGKILL)


def _call(main: Callable[[], None]) -> None:
    """As the interpreter would, but without taking apart what all forks share."""
    code: Any = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _tell(word: dict[str, Any]) -> None:
    os.write(1, (json.dumps(word) + "\n").encode())


def _become(request: dict[str, Any]) -> None:
    """A command of its own: its place, its streams, its arguments, its fault."""
    for number, path in ((0, os.devnull), (1, os.devnull), (2, request["errors"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    os.chdir(request["cwd"])
    os.environ.update(request["environment"])
    sys.argv = ["patchproof", *request["arguments"]]
    _suffer(Fault(**request["fault"]))


def _suffer(fault: Fault) -> None:
    if fault.die_at is not None:
        _die_at(fault.die_at, fault.folder)
    if fault.file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.file_bytes, fault.file_bytes))
    if fault.clock is not None:
        looks = iter(range(10**9))
        time.time = lambda: float(fault.clock or 0) - 3600 * next(looks)
        time.time_ns = lambda: int(time.time() * 1e9)
    if fault.powerless:
        _drop_capabilities()


def _die_at(event_number: int, folder: str) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in FILE_EVENTS and isinstance(arguments[0], (str, os.PathLike)):
            seen += os.fspath(arguments[0]).startswith(folder)
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _drop_capabilities() -> None:
    """No capability in force any more (capset, version 3): a folder without write permission cannot be written to."""
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if os.geteuid() == 0 and ctypes.CDLL(None, use_errno=True).capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    serve()
