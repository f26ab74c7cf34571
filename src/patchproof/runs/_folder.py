"""A run's folder: locked by one process, appended to line by line, continued only with what it began with."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from patchproof.models import is_whole, sealed
from patchproof.runs._files import (
    BEGIN_AGAIN,
    append,
    checksum,
    dump_json,
    end_of_last_line,
    make_folder,
    part_of,
    read_json,
    write_atomically,
)
from patchproof.runs._record import Record
from patchproof.types import CheckError, InputError


class RunFolder:
    """One run's folder, locked by one process at a time; what it has written survives whatever happens next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / "manifest.json"
        self.records_path = path / "records.jsonl"
        self.sums_path = path / "records.crc"
        self.results_path = path / "results.json"
        self.spoiled_path = path / "spoiled.json"

    @contextlib.contextmanager
    def open(self, manifest: Mapping[str, Any], *, resume: bool) -> Iterator[Mapping[str, Any]]:
        """Begin a run here, or go on with it; yields the manifest in force (the first session's, when resumed)."""
        make_folder(self.path)
        with self._locked():
            stored = self._stored_manifest()
            if stored is None:
                self._refuse_foreign()
                write_atomically(self.manifest_path, dump_json(sealed(manifest)))
            elif not resume:
                raise InputError(
                    f"{self.path} already holds a run; continue it with resume=True, or choose another folder"
                )
            else:
                refuse_differences(stored, manifest, where=self.path)
                self._refuse_spoiled()
            yield stored or manifest

    def _stored_manifest(self) -> dict[str, Any] | None:
        if not self.manifest_path.exists():
            return None
        stored = read_json(self.manifest_path)
        if not isinstance(stored.get("identity"), dict) or not isinstance(stored.get("command"), str):
            raise CheckError(f"{self.manifest_path} is damaged: no manifest of a run; {BEGIN_AGAIN}")
        if not is_whole(stored):
            raise CheckError(f"{self.manifest_path} is damaged: not what was written; {BEGIN_AGAIN}")
        return stored

    def spoil(self, reason: str) -> NoReturn:
        """What is in the folder cannot be trusted any more: fail, and let no later session go on with it."""
        write_atomically(self.spoiled_path, dump_json({"reason": reason}))
        raise CheckError(reason)

    def _refuse_spoiled(self) -> None:
        if self.spoiled_path.exists():
            reason = read_json(self.spoiled_path).get("reason")
            raise CheckError(f"{self.path} cannot be continued: in an earlier session {reason}")

    def _refuse_foreign(self) -> None:
        ours = (".lock", part_of(self.manifest_path).name)  # what a kill before the manifest was there has left
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name not in ours)
        if others:
            raise InputError(f"{self.path} holds {others[0]!r} but no manifest.json; choose another folder")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckError(f"another process is writing to {self.path}; wait for it, or stop it") from error
            yield

    def _lock_file(self) -> TextIO:
        try:
            return (self.path / ".lock").open("w")
        except OSError as error:
            raise InputError(
                f"cannot write to {self.path}: {error.strerror}; free space or make it writable, or use another folder"
            ) from error

    def records(self, *, repair: bool = True) -> list[Record]:
        """The finished records."""
        return list(self.each_record(repair=repair))

    def each_record(self, *, repair: bool = True) -> Iterator[Record]:
        """The finished records, one at a time; a last line cut short by a kill is none of them.

        With `repair`, which is for the one process that has the folder open, that line is removed, and so are
        checksums of lines that were never written.
        """
        sums, seen = self._sums(), []
        for number, line in enumerate(self._lines(repair=repair), start=1):
            seen.append(checksum(line))
            try:
                if seen[-1:] != sums[number - 1 : number] and number <= len(sums):
                    raise ValueError("its checksum is another")
                record = Record.parse(line.decode("utf-8"))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise CheckError(
                    f"{self.records_path}: line {number} is damaged ({error}); remove it and all lines after it, "
                    "then continue with resume=True"
                ) from error
            yield record
        whole = "".join(f"{one}\n" for one in seen)
        if repair and self._sums_text() != whole:  # also where a write stopped in the middle of a checksum
            write_atomically(self.sums_path, whole)

    def _lines(self, *, repair: bool) -> Iterator[bytes]:
        """The lines that have an end."""
        if not self.records_path.exists():
            return
        if repair:
            self._drop_unfinished_line()
        with self.records_path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))

    def _sums(self) -> list[str]:
        """The checksums of the lines, in their order; fewer than lines where the file was lost or is an older run's."""
        return self._sums_text().split("\n")[:-1]

    def _sums_text(self) -> str:
        try:
            return self.sums_path.read_text("ascii", errors="replace")
        except FileNotFoundError:
            return ""

    def _drop_unfinished_line(self) -> None:
        with self.records_path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            finished = end_of_last_line(file, size)
            if finished != size:
                file.truncate(finished)

    def append(self, lines: Sequence[bytes]) -> None:
        """Add lines of records; they are on disk when this returns. Checksums come first: no line is without one."""
        append(self.sums_path, "".join(f"{checksum(line)}\n" for line in lines).encode())
        append(self.records_path, b"".join(lines))

    def results(self) -> dict[str, Any] | None:
        """results.json, if an earlier session got to write all of it."""
        try:
            return read_json(self.results_path)
        except CheckError:
            return None

    def write_results(self, results: Mapping[str, Any]) -> None:
        write_atomically(self.results_path, dump_json(results))


def checked_prefix(
    records: Iterable[Record], indices: Sequence[int], path: Callable[[int], str], *, where: Path | None
) -> Iterator[Record]:
    """The records found, as long as they are the first ones of this run's plan, in its order."""
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


def refuse_differences(stored: Mapping[str, Any], current: Mapping[str, Any], *, where: Path) -> None:
    """A run goes on only with what it began with; what differs is named, down to the single setting."""
    if stored.get("schema") != current["schema"]:
        raise CheckError(f"{where} was written with schema {stored.get('schema')}, this is {current['schema']}")
    if stored["command"] != current["command"]:
        raise CheckError(
            f"{where} holds a `{stored['command']}` run, this is `{current['command']}`; choose another folder"
        )
    before = stored["identity"]
    if ("mask_patch" in before) if stored["command"] == "train" else ("defense" not in before):
        raise CheckError(f"{where} was begun with an earlier version of patchproof: finish it with that or begin again")
    different = list(differences(before, current["identity"]))
    if different:
        named = "; ".join(f"{key} was {_short(before)}, now {_short(now)}" for key, before, now in different)
        raise CheckError(f"{where} was made with something else, so it cannot be continued: {named}")


def differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The innermost values that differ, with their keys."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*now, *before]):
            yield from differences(before.get(name), now.get(name), name)
    elif before != now:
        yield key, before, now


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 90 else text[:89] + "…"
