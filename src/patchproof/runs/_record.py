"""One line per image: what was found, every percentage counted from these lines, with its exact interval."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

ACCURACIES = ("undefended", "defended", "certified")
ATTACK_ACCURACIES = ("undefended", "undefended_attacked", "defended", "attacked", "certified")

FEW = 4
"""Of fewer images nothing is concluded."""

LARGEST = 2**63 - 1
"""No index, label or count is larger."""


@dataclass(frozen=True)
class AttackFindings:
    """What attacks did to an image: is the answer still right under every patch tried?

    None where nothing was tried. `place` (top, left, height, width) and `attacked_label` belong to the patch that
    changed a right answer of the defence, and are None if none did. `passes` counts the copies the attacks evaluated,
    `queries` the answers they asked for.
    """

    undefended_attacked: bool | None = None
    attacked: bool | None = None
    place: tuple[Any, ...] | None = None
    """(top, left, height, width) of the patch; of two patches, one after the other."""
    attacked_label: int | None = None
    passes: int = 0
    queries: int = 0

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """One place for each patch; none where no patch changed the defence's answer."""
        if self.place is None:
            return ()
        return self.place if all(isinstance(part, tuple) for part in self.place) else (self.place,)


@dataclass(frozen=True)
class Record:
    """What was found about one image. A bad image has an `error` and no findings, and is counted nowhere.

    `evidence` is the defence's own, JSON values by name: for PatchCleanser `witness`, the two masks of the copy that
    decided and the label it answered.
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

    def line(self) -> str:
        values = {name: getattr(self, name) for name in BASE}
        values |= self.evidence
        values |= {} if self.attack is None else asdict(self.attack)
        values |= {} if self.error is None else {"error": self.error}
        return json.dumps(values, ensure_ascii=True, allow_nan=False) + "\n"

    @classmethod
    def parse(cls, line: str) -> Record:
        """The record of one line; ValueError if it is not one, or if something that is counted is not a number."""
        values = json.loads(line)
        if not isinstance(values, dict) or not {"index", "path", "label"} <= set(values):
            raise ValueError("not a record")
        base = {name: values.pop(name) for name in BASE if name in values}
        error = values.pop("error", None)
        attack = None
        if "attacked" in values:
            found = {name: values.pop(name) for name in ATTACK if name in values}
            place = found.pop("place", None)
            place = place and tuple(tuple(part) if isinstance(part, list) else part for part in place)
            attack = AttackFindings(**found, place=place)
        record = cls(**base, evidence=values, attack=attack, error=error)
        if not isinstance(record.path, str) or not isinstance(error, str | None):
            raise ValueError("a path and an error are text")  # noqa: TRY004
        attack = attack or AttackFindings()
        label = 0 if error is not None and record.label == -1 else record.label  # −1: not even its label could be read
        places = attack.places or ((0, 0, 0, 0),)
        whole = [record.index, label, record.forwards, *(value for place in places for value in place)]
        whole += [attack.passes, attack.queries, attack.attacked_label or 0]
        if not all(type(value) is int and 0 <= value <= LARGEST for value in whole) or {*map(len, places)} != {4}:
            raise ValueError(f"indices, labels, counts and the four of a place are whole numbers up to {LARGEST}")
        known = () if error is not None else (record.defended, record.certified)
        maybe = (attack.undefended_attacked, attack.attacked, None if error is not None else record.undefended)
        if not all(isinstance(f, bool) for f in known) or not all(isinstance(f, bool | None) for f in maybe):
            raise ValueError("a record needs its findings, which are true, false or null")
        number = isinstance(record.margin, int | float) and not isinstance(record.margin, bool)
        if record.margin is not None and not (number and abs(record.margin) <= sys.float_info.max):
            raise ValueError("a margin is a finite number")
        return record

    @property
    def broken(self) -> bool:
        """Certified, and yet a patch changed the answer: the proof or the program is wrong."""
        return bool(self.certified) and self.attack is not None and self.attack.attacked is False

    def finding(self, name: str) -> bool | None:
        """One of the accuracies' findings, by name."""
        return getattr(self, name) if name in ACCURACIES else getattr(self.attack, name, None)


BASE = tuple(f.name for f in fields(Record) if f.name not in ("evidence", "attack", "error"))
ATTACK = tuple(f.name for f in fields(AttackFindings))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`witness.label` becomes `label` inside `witness`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        outer, _, inner = name.partition(".")
        if inner:
            found.setdefault(outer, {})[inner] = value
        else:
            found[outer] = value
    return found


@dataclass(frozen=True)
class Rate:
    """k of n with the exact (Clopper–Pearson) 95% interval."""

    k: int
    n: int

    @property
    def rate(self) -> float:
        return self.k / self.n if self.n else 0.0

    @cached_property
    def interval(self) -> tuple[float, float]:
        from scipy.special import betaincinv  # a second that `patchproof --help` should not take

        low = float(betaincinv(self.k, self.n - self.k + 1, 0.025)) if self.k else 0.0
        high = float(betaincinv(self.k + 1, self.n - self.k, 0.975)) if self.k < self.n else 1.0
        return low, high

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval
        return {"k": self.k, "n": self.n, "rate": self.rate, "interval": [low, high]}


@dataclass
class Tally:
    """Counts over records as they come; an accuracy of `names` is counted over the records that have that finding."""

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
                self.broken += [record.index] if record.broken else []
        return self

    def rates(self) -> dict[str, Rate]:
        """Each accuracy, over the records that have that finding."""
        return {name: Rate(self.right[name], self.known[name]) for name in self.names}


def rates(records: Iterable[Record]) -> dict[str, Rate]:
    """The three accuracies of the records that have findings."""
    return Tally().add(records).rates()


@dataclass(frozen=True)
class Results:
    """What a run found; `content` is what results.json says. On processes that do not write, there are no records."""

    records: tuple[Record, ...]
    rates: Mapping[str, Rate]
    content: Mapping[str, Any]
    folder: Path | None = None

    @property
    def undefended(self) -> Rate:
        """The classifier alone, on clean images."""
        return self.rates["undefended"]

    @property
    def defended(self) -> Rate:
        """The defence, on clean images."""
        return self.rates["defended"]

    @property
    def certified(self) -> Rate:
        """Under every patch of the threat, provably."""
        return self.rates["certified"]

    @property
    def attacked(self) -> Rate:
        """Of `attack`: the defence under attack, an upper bound on robust accuracy."""
        return self._under_attack("attacked")

    @property
    def undefended_attacked(self) -> Rate:
        """Of `attack`: the classifier alone under attack."""
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
    """The class that the network answers nearly always, if there is one: it is right about it, and about hardly any
    other. How often each."""
    right = Counter(r.label for r in records if (r.defended if r.undefended is None else r.undefended))
    label, k = max(right.items(), key=lambda item: item[1], default=(-1, 0))
    n = sum(record.label == label for record in records)
    own, rest = Rate(k, n), Rate(sum(right.values()) - k, len(records) - n)
    found = min(own.k, rest.n) >= FEW and 10 * rest.k <= min(own.k, rest.n)
    return (label, own, rest) if found else None
