"""Two runs on the same images: the difference of their accuracies, image by image.

Both runs saw the same images, so most of what makes their separate intervals wide is common to them. What counts is the
images on which they differ: `gained` only by the second run, `lost` only by the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.special import bdtr

from patchproof.runs import StoredCertification

Z = 1.959963984540054
"""Of a two-sided 95% interval."""

POWER = 0.8416212335729143
"""Of a difference found four times in five."""

LEVEL = 0.05


@dataclass(frozen=True)
class Paired:
    """On how many images a finding holds in both runs, only in the first, only in the second, in neither."""

    both: int
    lost: int
    gained: int
    neither: int

    @property
    def n(self) -> int:
        return self.both + self.lost + self.gained + self.neither

    @property
    def difference(self) -> float:
        """The second rate minus the first."""
        return (self.gained - self.lost) / self.n if self.n else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95%, square-and-add of the two Wilson intervals with their correlation (Newcombe 1998, method 10)."""
        if not self.n:
            return -1.0, 1.0
        first, second = self.both + self.lost, self.both + self.gained
        (low1, high1), (low2, high2) = _wilson(first, self.n), _wilson(second, self.n)
        rate1, rate2 = first / self.n, second / self.n
        product = first * (self.n - first) * second * (self.n - second)
        together = self.both * self.neither - self.lost * self.gained
        phi = (max(together - self.n / 2, 0) if together > 0 else together) / math.sqrt(product) if product else 0.0

        def reach(a: float, b: float) -> float:
            return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

        below, above = reach(rate2 - low2, high1 - rate1), reach(high2 - rate2, rate1 - low1)
        return max(-1.0, self.difference - below), min(1.0, self.difference + above)

    @property
    def p(self) -> float:
        """McNemar's exact test: the chance, if both runs are equally good, of a split at least as uneven."""
        differing = self.lost + self.gained
        return min(1.0, 2 * float(bdtr(min(self.lost, self.gained), differing, 0.5))) if differing else 1.0

    def disagrees(self, p: float) -> bool:
        """Whether the interval says otherwise than the test, whose p may be corrected for several tests."""
        low, high = self.interval
        return (low <= 0 <= high) == (p < LEVEL)

    @property
    def images_needed(self) -> int | None:
        """So many images show a difference of this size four times in five; None for no difference."""
        if self.lost == self.gained:
            return None
        differing, d = (self.lost + self.gained) / self.n, abs(self.difference)
        return math.ceil(((Z * math.sqrt(differing) + POWER * math.sqrt(max(0.0, differing - d * d))) / d) ** 2)

    def as_dict(self) -> dict[str, Any]:
        counts = {"both": self.both, "lost": self.lost, "gained": self.gained, "neither": self.neither, "n": self.n}
        return {**counts, "difference": self.difference, "interval": list(self.interval), "p": self.p}


def _wilson(k: int, n: int) -> tuple[float, float]:
    middle, square = 2 * k + Z * Z, Z * math.sqrt(Z * Z + 4 * k * (n - k) / n)
    return (middle - square) / (2 * (n + Z * Z)), (middle + square) / (2 * (n + Z * Z))


def count_pairs(findings: Iterable[tuple[bool | None, bool | None]]) -> Paired:
    """Of the images on which both findings are known."""
    known = [pair for pair in findings if None not in pair]
    return Paired(*(known.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))


def holm(values: Sequence[float]) -> list[float]:
    """The p-values of several tests together (Holm 1979): each is the level at which its difference still counts."""
    adjusted, worst = [1.0] * len(values), 0.0
    for rank, number in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        worst = max(worst, min(1.0, (len(values) - rank) * values[number]))
        adjusted[number] = worst
    return adjusted


@dataclass(frozen=True)
class Comparison:
    """A run against the baseline: each accuracy, and certified accuracy by the baseline's labels, on common images.

    `corrected` are Holm's p-values of the accuracies, over all runs that are compared together.
    """

    base: StoredCertification
    run: StoredCertification
    accuracies: Mapping[str, Paired]
    classes: Mapping[int, Paired]
    corrected: dict[str, float] = field(default_factory=dict)

    @property
    def certified(self) -> Paired:
        return self.accuracies["certified"]


def why_not_paired(base: StoredCertification, run: StoredCertification) -> str | None:
    """Why the images of two runs are not the same ones, or their certificates not the same claim; None if they are."""
    if base.data_sha256 is None or run.data_sha256 is None:
        return "it is not known which images it is about"
    if base.data_sha256 != run.data_sha256:
        return "it is about other images (another data set, split or limit)"
    if base.guarantee != run.guarantee:
        return f"its certificates are {run.guarantee}, the baseline's {base.guarantee}"
    if not {record.index for record in base.good} & {record.index for record in run.good}:
        return "no image is done in both"
    return None


def compare(base: StoredCertification, *runs: StoredCertification) -> list[Comparison]:
    """Each run against the baseline; they can be paired."""
    found = []
    for run in runs:
        others = {record.index: record for record in run.good}
        pairs = [(record, others[record.index]) for record in base.good if record.index in others]
        names = [name for name in base.rates if name in run.rates]
        accuracies = {name: count_pairs((a.finding(name), b.finding(name)) for a, b in pairs) for name in names}
        labels: dict[int, list[tuple[bool | None, bool | None]]] = {}
        for a, b in pairs:
            labels.setdefault(a.label, []).append((a.certified, b.certified))
        found.append(Comparison(base, run, accuracies, {k: count_pairs(labels[k]) for k in sorted(labels)}))
    for name in base.rates:
        tested = [c for c in found if name in c.accuracies]
        for c, p in zip(tested, holm([c.accuracies[name].p for c in tested]), strict=True):
            c.corrected[name] = p
    return found
