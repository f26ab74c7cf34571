"""The folder of a run: locked by one process, appended to line by line, resumed only with the same settings."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from patchproof.geometry import size_words
from patchproof.machine import BEGIN_AGAIN, require_free
from patchproof.models import SEAL, is_whole, sealed
from patchproof.runs._record import Record
from patchproof.settings import TrainingSettings
from patchproof.types import CheckError, InputError

FOLLOWS_FROM = {
    "masks": {"patch_sizes", "patches", "image_size", "name"},
    "patch_sizes": {"image_size"},
    "image_size": {"architecture"},
    "resize": {"architecture", "image_size"},
    "crop": {"architecture", "image_size"},
    "interpolation": {"architecture"},
    "fill": {"architecture", "weights_sha256"},
    "weights_sha256": {"architecture", "seed"},
    "steps": {"epochs", "batch_size", "images"},
    "data_sha256": {"images"},
    "epochs": {f.name for f in fields(TrainingSettings)} - {"epochs"} | {"weights_sha256", "data_sha256", "images"},
}
"""A difference in a setting on the left is not named if one on the right, which causes it, differs too; more epochs
alone are allowed."""

THREAT = {"name", "image_size", "patch_sizes", "patches"}
"""Settings that all defences share; the others are the options of one defence and differ whenever its name does."""

SIZES = ("patch_sizes", "image_size", "resize", "crop")
"""Settings that are printed as 12×12."""

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Exceptions that reading values from damaged or hostile JSON can raise."""


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckError(f"{path} is damaged ({error}); {BEGIN_AGAIN}") from error
    if not isinstance(content, dict):
        raise CheckError(f"{path} is damaged: no JSON object; {BEGIN_AGAIN}")
    return content


def read_results(folder: Path) -> dict[str, Any] | None:
    """Return results.json, or None if it is missing or damaged."""
    try:
        return read_json(folder / "results.json")
    except CheckError:
        return None


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest after checking its seal."""
    manifest = read_json(path)
    if not isinstance(manifest.get("identity"), dict) or not isinstance(manifest.get("command"), str):
        raise CheckError(f"{path} is not the manifest of a run; {BEGIN_AGAIN}")
    if SEAL not in manifest or not is_whole(manifest):
        raise CheckError(f"{path} is damaged: not what was written; {BEGIN_AGAIN}")
    return manifest


def read_lines(
    lines: Sequence[bytes], parse: Callable[[str], Any], sums: Sequence[str] = ()
) -> tuple[list[Any], dict[int, Exception]]:
    """Parse the sound lines; return their values and, for each damaged line, its number (from 1) and the error.

    `sums` holds the checksums of the first lines; a line without one is not compared.
    """
    values: list[Any] = []
    damaged: dict[int, Exception] = {}
    for number, line in enumerate(lines, start=1):
        try:
            if number <= len(sums) and checksum(line + b"\n") != sums[number - 1]:
                raise ValueError("its checksum is another")
            values.append(parse(line.decode("utf-8")))
        except UNREADABLE as error:
            damaged[number] = error
    return values, damaged


def checksum(line: bytes) -> str:
    """CRC-32 of a line, including its line break."""
    return f"{zlib.crc32(line):08x}"


def dump_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, dump_json(content))


def write_atomically(path: Path, content: str) -> None:
    """Write all of the content or nothing, even if the machine stops half-way."""
    temporary = path.with_name(path.name + ".part")
    _write(temporary, "wb", content.encode())
    temporary.replace(path)


def _write(path: Path, mode: str, content: bytes) -> None:
    with path.open(mode) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class RunFolder:
    """The folder of one run, locked by one process at a time; whatever has been written survives a kill."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / "manifest.json"
        self.records_path = path / "records.jsonl"
        self.sums_path = path / "records.crc"
        self.spoiled_path = path / "spoiled.json"
        self.progress_path = path / "progress.jsonl"

    @contextlib.contextmanager
    def open(
        self, manifest: Mapping[str, Any], *, resume: bool, longer: Callable[[Mapping[str, Any]], bool] | None = None
    ) -> Iterator[Mapping[str, Any]]:
        """Begin or resume a run, and yield the manifest in force: when resumed, that of the first session.

        If `longer(stored manifest)` is true, the run is the stored one with more steps, and its manifest is updated.
        """
        require_free(self.path, resume=resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            locked = FileLock(self.path / ".lock").acquire(timeout=0)
        except Timeout as error:
            raise CheckError(f"another process is writing to {self.path}; wait for it, or stop it") from error
        except OSError as error:
            raise InputError(
                f"cannot write to {self.path}: {error.strerror}; free space or make it writable, or use another folder"
            ) from error
        with locked:
            if not resume and self.manifest_path.exists():
                raise CheckError(f"another process has begun a run in {self.path}; choose another folder")
            if not self.manifest_path.exists():
                write_json(self.manifest_path, sealed(manifest))
                yield manifest
                return
            stored = read_manifest(self.manifest_path)
            if longer is not None and longer(stored):
                stored |= {key: manifest[key] for key in ("identity", "config", "steps")}
                write_json(self.manifest_path, sealed(stored))
            refuse_differences(stored, manifest, where=self.path)
            if self.spoiled_path.exists():
                reason = read_json(self.spoiled_path).get("reason")
                raise CheckError(f"{self.path} cannot be continued: in an earlier session {reason}")
            yield stored

    def spoil(self, reason: str) -> None:
        """Note that the records cannot be trusted; every later session is refused."""
        write_json(self.spoiled_path, {"reason": reason})

    def records(self) -> list[Record]:
        """Read the finished records; remove a last line cut short by a kill, and checksums of lines never written.

        Only the process that has the folder open may call this.
        """
        packed = self.records_path.with_name("records.jsonl.xz")
        if packed.exists() and not self.records_path.exists():
            raise CheckError(f"{packed} is packed; unpack it (xz -d) to go on with the run")
        content = self.records_path.read_bytes() if self.records_path.exists() else b""
        sums = self.sums_path.read_text("ascii", errors="replace") if self.sums_path.exists() else ""
        *lines, cut = content.split(b"\n")
        records, damaged = read_lines(lines, Record.parse, sums.split("\n")[:-1])
        for number, error in damaged.items():
            raise CheckError(
                f"{self.records_path}: line {number} is damaged ({error}); remove it and all lines after it, "
                "then continue with resume=True"
            ) from error
        if cut:
            os.truncate(self.records_path, len(content) - len(cut))
        whole = "".join(checksum(line + b"\n") + "\n" for line in lines)
        if sums != whole:  # also if a write stopped in the middle of a checksum
            write_atomically(self.sums_path, whole)
        return records

    def append(self, lines: Sequence[bytes], spent: Mapping[str, Any]) -> None:
        """Add lines of records, and what all sessions took so far; they are on disk when this returns.

        Checksums are written first, so that no line is ever without one.
        """
        with self.progress_path.open("ab") as file:
            file.write(b"\n" + json.dumps(spent).encode())  # the break comes first: a line cut short damages no other
        _write(self.sums_path, "ab", "".join(checksum(line) + "\n" for line in lines).encode())
        _write(self.records_path, "ab", b"".join(lines))

    def spent(self, done: int) -> Mapping[str, Any]:
        """What the first `done` images took in earlier sessions, in the form of results.json; {} if that is unknown.

        After an interrupted write, the latest line may speak of records that were not written: an older one counts.
        """
        lines = self.progress_path.read_bytes().split(b"\n") if self.progress_path.exists() else []
        latest, found = (0, 0.0), dict[str, Any]()
        for state in (read_results(self.path), *read_lines(lines, json.loads)[0]):
            with contextlib.suppress(*UNREADABLE):
                moment = int(state["images"]["done"]), float(state["cost"]["seconds"])
                if latest <= moment and moment[0] <= done:
                    latest, found = moment, state
        return found


def checked_prefix(
    records: Iterable[Record], indices: Sequence[int], path: Callable[[int], str], *, where: Path
) -> Iterator[Record]:
    """Yield the records after checking that they are about the first planned images, in order."""
    for number, record in enumerate(records):
        if number == len(indices):
            raise CheckError(f"{where} holds more than the {len(indices)} records that the run has images for")
        index = indices[number]
        if (record.index, record.path) != (index, path(index)):
            raise CheckError(
                f"{where}: record {number + 1} is about image {record.index} ({record.path}), "
                f"this run's is {index} ({path(index)}); the folder belongs to another run"
            )
        yield record


def require_command(stored: Mapping[str, Any], command: str, *, where: Path) -> None:
    """Refuse to go on with the run of another command."""
    if stored["command"] != command:
        raise CheckError(f"{where} holds a run of `{stored['command']}`, this is `{command}`; choose another folder")


def refuse_differences(stored: Mapping[str, Any], current: Mapping[str, Any], *, where: Path) -> None:
    """Refuse to resume with another identity, and name each setting that differs."""
    if stored.get("schema") != current["schema"]:
        raise CheckError(f"{where} was written with schema {stored.get('schema')}, this is {current['schema']}")
    require_command(stored, current["command"], where=where)
    before, now = stored["identity"], current["identity"]
    different = {name: values for name, *values in differences(before, now)}
    if all(set(fill or (0.5,)) == {0.5} for fill in different.get("fill", ())):  # no fill means mid-grey
        different.pop("fill", None)
    consequences = {name for name, others in FOLLOWS_FROM.items() if others & different.keys()}
    if "name" in different:
        consequences |= {*before.get("defense", ()), *now.get("defense", ())} - THREAT
    causes = {name: values for name, values in different.items() if name not in consequences}
    logits: list[Any] = [stored.get("logits"), current.get("logits")]
    if not causes and all(logits) and not _close(*logits):
        causes["answer to the first image"] = logits
    named = "; ".join(
        f"{name} was {_short(name, one)}, now {_short(name, other)}" for name, (one, other) in causes.items()
    )
    if named:
        if stored["command"] == "train" and "weights_sha256" in causes:
            named += "; the classifier must be as it was when the training began, so build or load it anew"
        raise CheckError(f"{where} was made with something else, so it cannot be continued: {named}")


def _close(logits: Sequence[float], others: Sequence[float]) -> bool:
    """True if the logits differ by no more than check_classifier allows for rounding."""
    most = 0.01 * max(map(abs, logits))
    return len(logits) == len(others) and all(abs(a - b) <= most for a, b in zip(logits, others, strict=True))


def differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, old and new value of each setting that differs, the innermost where settings are nested."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for inner in dict.fromkeys([*now, *before]):
            yield from differences(before.get(inner), now.get(inner), inner)
    elif before != now:
        yield name, before, now


def _short(name: str, value: Any) -> str:
    sizes = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if name in SIZES and all(isinstance(size, list) and [type(side) for side in size] == [int, int] for size in sizes):
        return size_words(*((height, width) for height, width in sizes))
    text = value if isinstance(value, str) else json.dumps(value)
    if re.fullmatch("[0-9a-f]{64}", text):  # a sha256
        return f"{text[:12]}…"
    return text if len(text) <= 90 else text[:89] + "…"
