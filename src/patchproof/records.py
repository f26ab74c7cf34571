"""A run on disk: one JSON line an image, a manifest beside it, and every percentage computed from the lines."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

from scipy.stats import beta

from patchproof.seals import is_whole, sealed
from patchproof.types import CheckError, InputError

SCHEMA = 1
BEGIN_AGAIN = "restore it from a copy, or begin again with another --output"
TAIL_BYTES = 1 << 16
ACCURACIES = ("undefended", "defended", "certified")
ATTACK_ACCURACIES = ("undefended", "undefended_attacked", "defended", "attacked", "certified")

Kind = TypeVar("Kind", bound="Record")


@dataclass(frozen=True)
class Witness:
    """The copy that decided: its two masks (indices into the mask set) and the label it answered."""

    masks: tuple[int, int]
    label: int


@dataclass(frozen=True)
class Record:
    """What was found out about one image. A bad image has an `error` and no findings, and is counted nowhere."""

    index: int
    path: str
    label: int
    undefended: bool | None = None
    defended: bool | None = None
    certified: bool | None = None
    margin: float | None = None
    forwards: int = 0
    witness: Witness | None = None
    error: str | None = None

    def line(self) -> str:
        values = asdict(self)
        if self.error is None:
            del values["error"]
        return json.dumps(values, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def parse(cls, line: str) -> Record:
        """The record of one line; ValueError if it is not one."""
        return _parse(json.loads(line), cls)


@dataclass(frozen=True)
class AttackRecord(Record):
    """A record with what attacks did to the image: is the answer still right under every patch tried?

    None where nothing was tried. `place` (top, left, height, width) and `attacked_label` belong to the patch that
    changed the defended answer. `passes` counts the copies the attacks looked at, `queries` the answers they asked for.
    """

    undefended_attacked: bool | None = None
    attacked: bool | None = None
    place: tuple[int, int, int, int] | None = None
    attacked_label: int | None = None
    passes: int = 0
    queries: int = 0

    @property
    def broken(self) -> bool:
        """Certified, and yet a patch changed the answer: the proof or the program is wrong."""
        return bool(self.certified) and self.attacked is False


def parse_record(line: str) -> Record:
    """The record of one line, with the findings of an attack if the line has them."""
    values = json.loads(line)
    if not isinstance(values, dict) or "attacked" not in values:
        return _parse(values, Record)
    if not all(isinstance(values.get(name), bool | None) for name in ("undefended_attacked", "attacked")):
        raise ValueError("a finding under attack is true, false or null")
    place = values.get("place")
    record = _parse(values | {"place": None if place is None else tuple(place)}, AttackRecord)
    _require_whole([*(record.place or ()), record.passes, record.queries, record.attacked_label or 0])
    if len(record.place or range(4)) != 4:
        raise ValueError("a place has four numbers")
    return record


def _parse(values: Any, kind: type[Kind]) -> Kind:
    if not isinstance(values, dict) or not set(values) <= {f.name for f in fields(kind)}:
        raise ValueError("not a record")
    if not isinstance(values.get("index"), int) or not isinstance(values.get("path"), str):
        raise ValueError("a record needs an index and a path")  # noqa: TRY004
    witness = values.get("witness")
    if witness is not None:
        values["witness"] = Witness(tuple(witness["masks"]), witness["label"])
    record = kind(**values)
    if record.error is None and not all(isinstance(getattr(record, name), bool) for name in ACCURACIES):
        raise ValueError("a record needs all three findings")
    _require_types(record)
    return record


def _require_types(record: Record) -> None:
    """Everything that is counted is a number; ValueError otherwise."""
    _require_whole([record.index, record.label, record.forwards])
    if record.witness is not None:
        _require_whole([*record.witness.masks, record.witness.label])
        if len(record.witness.masks) != 2:
            raise ValueError("a witness has two masks")
    if record.margin is not None and not (_is_number(record.margin) and math.isfinite(record.margin)):
        raise ValueError("a margin is a finite number")
    if not isinstance(record.error, str | None):
        raise ValueError("an error is words")  # noqa: TRY004


def _require_whole(values: Iterable[Any]) -> None:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("indices, labels and counts are whole numbers")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Rate:
    """k of n with the exact (Clopper–Pearson) 95% interval."""

    k: int
    n: int

    @property
    def rate(self) -> float:
        return self.k / self.n if self.n else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return _clopper_pearson(self.k, self.n)

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {"k": self.k, "n": self.n, "rate": self.rate, "interval": [low, high]}


@lru_cache(maxsize=4096)
def _clopper_pearson(k: int, n: int) -> tuple[float, float]:
    low = float(beta.ppf(0.025, k, n - k + 1)) if k else 0.0
    high = float(beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0
    return low, high


@dataclass
class Tally:
    """Counts over records as they come, so that fifty thousand of them take no more memory than five.

    An accuracy of `names` is counted over the records that have that finding.
    """

    names: Sequence[str] = ACCURACIES
    done: int = 0
    good: int = 0
    forwards: int = 0
    right: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)

    def add(self, records: Iterable[Record]) -> Tally:
        for record in records:
            self.done += 1
            if record.error is None:
                self.good += 1
                self.forwards += record.forwards
                for name in self.names:
                    finding = getattr(record, name)
                    self.right[name] += finding is True
                    self.known[name] += finding is not None
        return self

    def rates(self) -> dict[str, Rate]:
        """Each accuracy, over the records that have that finding."""
        return {name: Rate(self.right[name], self.known[name]) for name in self.names}

    def results(self, *, planned: int, available: int, seconds: float, doubts: Sequence[str] = ()) -> dict[str, Any]:
        """The content of results.json. Partial: not every image of the data set has been looked at, or `doubts`."""
        bad = self.done - self.good
        partial = [f"{planned} of {available} images were asked for (--limit)"] if planned < available else []
        if self.done < planned:
            partial.append(f"{self.done} of {planned} images are done; continue with --resume")
        if bad:
            partial.append(f"{bad} bad images were skipped")
        partial += doubts
        return {
            "schema": SCHEMA,
            "status": "partial" if partial else "complete",
            "partial": partial,
            "images": {"done": self.done, "planned": planned, "available": available, "bad": bad},
            **{name: rate.as_dict() for name, rate in self.rates().items()},
            "cost": {
                "forwards": self.forwards,
                "forwards_per_image": self.forwards / self.good if self.good else 0.0,
                "seconds": round(seconds, 3),
            },
        }


def rates(records: Iterable[Record]) -> dict[str, Rate]:
    """The three accuracies of the records that have findings."""
    return Tally().add(records).rates()


def summarize(records: Iterable[Record], *, planned: int, available: int, seconds: float) -> dict[str, Any]:
    """The content of results.json, from the records themselves."""
    return Tally().add(records).results(planned=planned, available=available, seconds=seconds)


class RunFolder:
    """One run's folder, held by one process at a time; what it has written survives whatever happens next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / "manifest.json"
        self.records_path = path / "records.jsonl"
        self.sums_path = path / "records.crc"
        self.results_path = path / "results.json"

    @contextlib.contextmanager
    def open(self, manifest: Mapping[str, Any], *, resume: bool) -> Iterator[Mapping[str, Any]]:
        """Begin a run here, or go on with it; yields the manifest in force (the first session's, when resumed)."""
        _make_folder(self.path)
        with self._locked():
            stored = self._stored_manifest()
            if stored is None:
                self._refuse_foreign()
                write_atomically(self.manifest_path, dump_json(sealed(manifest)))
            elif not resume:
                raise InputError(
                    f"{self.path} already holds a run; continue it with --resume, or choose another --output"
                )
            else:
                refuse_differences(stored, manifest, where=self.path)
            yield stored or manifest

    @contextlib.contextmanager
    def open_shared(self, manifest: Mapping[str, Any], *, resume: bool, writes: bool) -> Iterator[None]:
        """As `open`, for one of several processes of which one writes."""
        if not writes:
            yield
            return
        with self.open(manifest, resume=resume):
            yield

    def _stored_manifest(self) -> dict[str, Any] | None:
        if not self.manifest_path.exists():
            return None
        stored = read_json(self.manifest_path)
        if not isinstance(stored.get("identity"), dict) or not isinstance(stored.get("command"), str):
            raise CheckError(f"{self.manifest_path} is damaged: no manifest of a run; {BEGIN_AGAIN}")
        if not is_whole(stored):
            raise CheckError(f"{self.manifest_path} is damaged: not what was written; {BEGIN_AGAIN}")
        return stored

    def _refuse_foreign(self) -> None:
        ours = (".lock", _part(self.manifest_path).name)  # what a kill before the manifest was there has left
        others = sorted(entry.name for entry in self.path.iterdir() if entry.name not in ours)
        if others:
            raise InputError(f"{self.path} holds {others[0]!r} but no manifest.json; choose another --output")

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
                f"cannot write to {self.path}: {error.strerror}; make room or make it writable, or choose another "
                "--output"
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
            seen.append(_sum(line))
            try:
                if seen[-1:] != sums[number - 1 : number] and number <= len(sums):
                    raise ValueError("its checksum is another")
                record = parse_record(line.decode("utf-8"))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise CheckError(
                    f"{self.records_path}: line {number} is damaged ({error}); remove it and all lines after it, "
                    "then continue with --resume"
                ) from error
            yield record
        if repair and seen != sums:
            write_atomically(self.sums_path, "".join(f"{one}\n" for one in seen))

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
        try:
            return self.sums_path.read_text("ascii", errors="replace").split("\n")[:-1]
        except FileNotFoundError:
            return []

    def _drop_unfinished_line(self) -> None:
        with self.records_path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            finished = _end_of_last_line(file, size)
            if finished != size:
                file.truncate(finished)

    def append(self, records: Iterable[Record]) -> None:
        """Add records; they are on disk when this returns. Their checksums come first, so that no line is without."""
        lines = [record.line().encode() for record in records]
        _append(self.sums_path, "".join(f"{_sum(line)}\n" for line in lines).encode())
        _append(self.records_path, b"".join(lines))

    def results(self) -> dict[str, Any] | None:
        """results.json, if an earlier session got to write it."""
        return read_json(self.results_path) if self.results_path.exists() else None

    def write_results(self, results: Mapping[str, Any]) -> None:
        write_atomically(self.results_path, dump_json(results))


def checked_prefix(
    records: Iterable[Record], indices: Sequence[int], path: Callable[[int], str], *, where: Path
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
    """A run goes on only with what it began with; the first difference is named."""
    if stored.get("schema") != current["schema"]:
        raise CheckError(f"{where} was written with schema {stored.get('schema')}, this is {current['schema']}")
    if stored["command"] != current["command"]:
        raise CheckError(
            f"{where} holds a `{stored['command']}` run, this is `{current['command']}`; choose another --output"
        )
    before, now = stored["identity"], current["identity"]
    different = [key for key in now if before.get(key) != now[key]]
    if different:
        named = "; ".join(f"{key} was {_short(before.get(key))}, now {_short(now[key])}" for key in different)
        raise CheckError(f"{where} was made with something else, so it cannot be continued: {named}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 90 else text[:89] + "…"


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckError(f"{path} is damaged ({error}); {BEGIN_AGAIN}") from error
    if not isinstance(content, dict):
        raise CheckError(f"{path} is damaged: no JSON object; {BEGIN_AGAIN}")
    return content


def dump_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def write_atomically(path: Path, content: str) -> None:
    """All of it or nothing, also when the machine stops half-way."""
    temporary = _part(path)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _end_of_last_line(file: BinaryIO, end: int) -> int:
    """The position after the last line break before `end`; 0 where there is none."""
    while end:
        start = max(0, end - TAIL_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sum(line: bytes) -> str:
    return f"{zlib.crc32(line):08x}"


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create the folder {path}: {error.strerror}") from error
