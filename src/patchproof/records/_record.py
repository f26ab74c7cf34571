"""One line about one image: what was found out, read back with every type checked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

ACCURACIES = ("undefended", "defended", "certified")
ATTACK_ACCURACIES = ("undefended", "undefended_attacked", "defended", "attacked", "certified")

LARGEST = 2**63 - 1
"""No index, label or count is larger; Python's own whole numbers have no end, but what is computed from them has."""

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
    changed a right answer of the defence, and are None if none did. `passes` counts the copies the attacks looked at,
    `queries` the answers they asked for.
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
    if record.margin is not None and not (_is_number(record.margin) and abs(record.margin) <= sys.float_info.max):
        raise ValueError("a margin is a finite number")
    if not isinstance(record.error, str | None):
        raise ValueError("an error is words")  # noqa: TRY004


def _require_whole(values: Iterable[Any]) -> None:
    if not all(type(value) is int and 0 <= value <= LARGEST for value in values):
        raise ValueError(f"indices, labels and counts are whole numbers up to {LARGEST}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
