"""One record per image, and the accuracies counted from the records with their exact intervals."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from patchproof.types import InputError

ACCURACIES = ("undefended", "defended", "certified")
ATTACK_ACCURACIES = ("undefended", "undefended_attacked", "defended", "attacked", "certified")

FEW = 4
"""Fewest images for which a conclusion is drawn."""

LARGEST = 2**63 - 1
"""Largest index, label or count that a record may hold."""


@dataclass(frozen=True)
class AttackFindings:
    """Whether the answers for an image stayed right under every patch tried; None if no patch was tried.

    `place` and `attacked_label` belong to the patch that changed a right answer of the defence, if one did. `passes`
    counts the copies that the attacks evaluated, `queries` the answers that they asked for.
    """

    undefended_attacked: bool | None = None
    attacked: bool | None = None
    place: tuple[Any, ...] | None = None
    """Location (top, left, height, width) of the patch; with two patches, a tuple of two locations."""
    attacked_label: int | None = None
    passes: int = 0
    queries: int = 0

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """One location per patch; empty if no patch changed the defence's answer."""
        if self.place is None:
            return ()
        return self.place if all(isinstance(part, tuple) for part in self.place) else (self.place,)


@dataclass(frozen=True)
class Record:
    """The findings for one image. A bad image has an `error` and no findings, and no accuracy counts it.

    `evidence` holds the defence's own JSON values by name: for PatchCleanser `witness`, the two masks of the copy that
    decided and the label of that copy.
    """

    index: int
    path: str
    label: int
    undefended: bool | None = None
    defended: bool | None = None
    certified: bool | None = None
    margin: float | None = None
    forwards: int = 0
    evidence: Mapping[str, Any] = field(default_factory=dict)
    attack: AttackFindings | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        taken = FIELDS & self.evidence.keys()
        if taken:
            raise InputError(f"evidence cannot be called {min(taken)!r}: that is a field of every record")

    def line(self) -> str:
        values = {name: getattr(self, name) for name in BASE} | dict(self.evidence)
        if self.attack is not None:
            values.update(asdict(self.attack))
        if self.error is not None:
            values["error"] = self.error
        return json.dumps(values, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def parse(cls, line: str) -> Record:
        """Read one line; ValueError if it is not a record or a value has the wrong type or range."""
        values = json.loads(line)
        if not isinstance(values, dict) or not {"index", "path", "label"} <= set(values):
            raise ValueError("not a record")
        base = {name: values.pop(name) for name in BASE if name in values}
        error = values.pop("error", None)
        attack = None
        if "attacked" in values:
            found = {name: values.pop(name) for name in ATTACK if name in values}
            if found.get("place") is not None:
                found["place"] = tuple(tuple(part) if isinstance(part, list) else part for part in found["place"])
            attack = AttackFindings(**found)
        record = cls(**base, evidence=values, attack=attack, error=error)
        attack = attack or AttackFindings()
        if not isinstance(record.path, str) or not isinstance(error, str | None):
            raise ValueError("a path and an error are text")  # noqa: TRY004
        counts = [record.index, record.forwards, attack.passes, attack.queries, attack.attacked_label or 0]
        if error is None or record.label != -1:  # −1: the label of a bad image could not be read either
            counts.append(record.label)
        for place in attack.places:
            if len(place) != 4:
                raise ValueError("a location is (top, left, height, width)")
            counts += place
        if not all(type(count) is int and 0 <= count <= LARGEST for count in counts):
            raise ValueError(f"indices, labels, counts and locations are whole numbers up to {LARGEST}")
        required = (record.defended, record.certified) if error is None else ()
        optional = (record.undefended, attack.undefended_attacked, attack.attacked)
        if not all(isinstance(f, bool) for f in required) or not all(isinstance(f, bool | None) for f in optional):
            raise ValueError("a record needs its findings, which are true, false or null")
        margin = 0 if record.margin is None else record.margin
        if type(margin) not in (int, float) or not abs(margin) <= sys.float_info.max:
            raise ValueError("a margin is a finite number")
        return record

    @property
    def broken(self) -> bool:
        """True if a patch changed a certified answer: then the proof or the program is wrong."""
        return bool(self.certified) and self.attack is not None and self.attack.attacked is False

    def finding(self, name: str) -> bool | None:
        """Return the finding that the accuracy `name` counts."""
        return getattr(self, name) if name in ACCURACIES else getattr(self.attack, name, None)


BASE = tuple(f.name for f in fields(Record) if f.name not in ("evidence", "attack", "error"))
ATTACK = tuple(f.name for f in fields(AttackFindings))
FIELDS = {*BASE, *ATTACK, "error"}


@dataclass(frozen=True)
class Rate:
    """k of n with the exact (Clopper–Pearson) 95% interval."""

    k: int
    n: int

    @property
    def rate(self) -> float:
        """k / n; NaN if nothing was measured."""
        return self.k / self.n if self.n else math.nan

    @cached_property
    def interval(self) -> tuple[float, float]:
        from scipy.special import betaincinv  # importing scipy takes a second, too long for `patchproof --help`

        low = float(betaincinv(self.k, self.n - self.k + 1, 0.025)) if self.k else 0.0
        high = float(betaincinv(self.k + 1, self.n - self.k, 0.975)) if self.k < self.n else 1.0
        return low, high

    def as_dict(self) -> dict[str, Any]:
        return {"k": self.k, "n": self.n, "rate": self.rate if self.n else None, "interval": list(self.interval)}


@dataclass
class Tally:
    """Running counts over records; each accuracy in `names` counts only the records that have its finding."""

    names: Sequence[str] = ACCURACIES
    done: int = 0
    good: int = 0
    forwards: int = 0
    passes: int = 0
    queries: int = 0
    broken: list[int] = field(default_factory=list)
    right: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)

    def add(self, records: Iterable[Record]) -> Tally:
        for record in records:
            self.done += 1
            if record.error is not None:
                continue
            self.good += 1
            self.forwards += record.forwards
            for name in self.names:
                finding = record.finding(name)
                self.right[name] += finding is True
                self.known[name] += finding is not None
            if record.attack is not None:
                self.passes += record.attack.passes
                self.queries += record.attack.queries
            if record.broken:
                self.broken.append(record.index)
        return self

    def rates(self) -> dict[str, Rate]:
        return {name: Rate(self.right[name], self.known[name]) for name in self.names}


def rates(records: Iterable[Record]) -> dict[str, Rate]:
    """Count undefended, defended and certified accuracy, each over the records that have the finding."""
    return Tally().add(records).rates()


@dataclass(frozen=True)
class Results:
    """The outcome of a run; `content` is results.json. Only the process that writes the run has records."""

    records: tuple[Record, ...] = field(repr=False)
    rates: Mapping[str, Rate]
    content: Mapping[str, Any] = field(repr=False)
    folder: Path | None = None

    @property
    def undefended(self) -> Rate:
        """Accuracy of the classifier alone on clean images."""
        return self.rates["undefended"]

    @property
    def defended(self) -> Rate:
        """Accuracy of the defence on clean images."""
        return self.rates["defended"]

    @property
    def certified(self) -> Rate:
        """Accuracy that is proved under every patch of the threat."""
        return self.rates["certified"]

    @property
    def attacked(self) -> Rate:
        """Accuracy of the defence under `pp.attack`, an upper bound on its robust accuracy."""
        return self._under_attack("attacked")

    @property
    def undefended_attacked(self) -> Rate:
        """Accuracy of the classifier alone under `pp.attack`."""
        return self._under_attack("undefended_attacked")

    def _under_attack(self, name: str) -> Rate:
        if name not in self.rates:
            raise AttributeError(f"these results have no `{name}`: nothing was attacked; use pp.attack")
        return self.rates[name]

    @property
    def broken(self) -> tuple[Record, ...]:
        """Certified images whose answer a patch changed: must be empty."""
        return tuple(record for record in self.records if record.broken)


def one_answer(records: Sequence[Record]) -> tuple[int, Rate, Rate] | None:
    """The class that a degenerate network nearly always answers, its accuracy on that class and on all others.

    None unless the network is right on one class and on hardly any image of another.
    """
    right = Counter(r.label for r in records if (r.defended if r.undefended is None else r.undefended))
    if not right:
        return None
    label, k = right.most_common(1)[0]
    n = sum(record.label == label for record in records)
    own, others = Rate(k, n), Rate(right.total() - k, len(records) - n)
    enough = min(own.k, others.n) >= FEW
    return (label, own, others) if enough and 10 * others.k <= min(own.k, others.n) else None
