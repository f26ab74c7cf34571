"""Every percentage, counted from records, with its exact interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from patchproof.records._record import ACCURACIES, Record

SCHEMA = 1


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
    from scipy.special import betaincinv  # a second that `patchproof --help` should not take

    low = float(betaincinv(k, n - k + 1, 0.025)) if k else 0.0
    high = float(betaincinv(k + 1, n - k, 0.975)) if k < n else 1.0
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
