"""What is counted from records: by outcome, class and mask, under attack, and of two runs on the same images.

Two runs that saw the same images have most of what makes their separate intervals wide in common. What counts is the
images on which they differ: `gained` only by the second run, `lost` only by the first.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.special import bdtr

from patchproof.runs import ATTACK_ACCURACIES, Rate, Record, StoredCertification, Tally, rates

MOST_CLASSES = 40
"""With more classes, the figure shows the distribution instead."""

FEW_PER_CLASS = 5
"""With fewer images per class on average, and many classes, nothing is shown by class: single images are no rates."""

FEW = 10
"""Images of a class below which the class is not called weak."""

Z = 1.959963984540054
"""Of a two-sided 95% interval."""

POWER = 0.8416212335729143
"""Of a difference found four times in five."""

LEVEL = 0.05


def outcomes(run: StoredCertification) -> dict[str, list[Record]]:
    good = run.good
    return {"certified": [r for r in good if r.certified], "not certified": [r for r in good if not r.certified]}


def by_class(run: StoredCertification) -> dict[int, dict[str, Rate]]:
    """The accuracies of each label, in the order of the labels."""
    found: dict[int, list[Record]] = {}
    for record in run.good:
        found.setdefault(record.label, []).append(record)
    return {label: rates(found[label]) for label in sorted(found)}


def enough_per_class(run: StoredCertification) -> bool:
    classes = len(by_class(run))
    return classes <= MOST_CLASSES or len(run.good) >= FEW_PER_CLASS * classes


def witness(run: StoredCertification, record: Record) -> tuple[tuple[int, ...], int | None]:
    """The numbers of the masks that decided, each once, and of unions those of their parts; and the label under them.
    None where the record has no witness that fits the run."""
    found = record.evidence.get("witness")
    masks = found.get("masks") if isinstance(found, Mapping) else None
    if run.masks is None or not isinstance(found, Mapping) or not isinstance(masks, list):
        return (), None
    if not all(type(number) is int and 0 <= number < len(run.masks) for number in masks):
        return (), None
    rects, label = (rect for number in masks for rect in run.masks.parts[number]), found.get("label")
    return tuple(dict.fromkeys(map(run.masks.blocks.index, rects))), label if type(label) is int else None


def mask_shares(run: StoredCertification, records: Sequence[Record]) -> dict[int, Rate]:
    """For each mask the share of these images whose deciding masks it is among, most often first."""
    decided = [masks for record in records if (masks := witness(run, record)[0])]
    found = Counter(number for masks in decided for number in masks)
    return {number: Rate(k, len(decided)) for number, k in sorted(found.items(), key=lambda one: (-one[1], one[0]))}


def attacked_rates(run: StoredCertification) -> dict[str, Rate]:
    """All five over the same images: one that was not attacked counts with its clean answer, so the rate stays an upper
    bound. What was not attacked at all, or has no clean answers, has no rate."""
    found = Tally(ATTACK_ACCURACIES).add(run.attacks).rates()
    for name, clean in (("undefended_attacked", "undefended"), ("attacked", "defended")):
        if found[name].n:
            answers = [r.finding(clean) if r.finding(name) is None else r.finding(name) for r in run.attacks]
            found[name] = Rate(sum(map(bool, answers)), len(answers))
    return {name: rate for name, rate in found.items() if rate.n}


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
        n = self.n
        if not n:
            return -1.0, 1.0
        first, second = self.both + self.lost, self.both + self.gained
        reaches = []
        for k in (first, second):
            middle, square = 2 * k + Z * Z, Z * math.sqrt(Z * Z + 4 * k * (n - k) / n)
            low, high = (end / (2 * (n + Z * Z)) for end in (middle - square, middle + square))
            reaches.append((k / n - low, high - k / n))
        (below1, above1), (below2, above2) = reaches
        product = first * (n - first) * second * (n - second)
        together = self.both * self.neither - self.lost * self.gained
        phi = (max(together - n / 2, 0) if together > 0 else together) / math.sqrt(product) if product else 0.0
        below, above = (
            math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b)) for a, b in ((below2, above1), (above2, below1))
        )
        return max(-1.0, self.difference - below), min(1.0, self.difference + above)

    @property
    def p(self) -> float:
        """McNemar's exact test: the chance, if both runs are equally good, of a split at least as uneven."""
        differing = self.lost + self.gained
        return min(1.0, 2 * float(bdtr(min(self.lost, self.gained), differing, 0.5))) if differing else 1.0

    @property
    def images_needed(self) -> int | None:
        """So many images show a difference of this size four times in five; None for no difference."""
        if self.lost == self.gained:
            return None
        differing, d = (self.lost + self.gained) / self.n, abs(self.difference)
        return math.ceil(((Z * math.sqrt(differing) + POWER * math.sqrt(max(0.0, differing - d * d))) / d) ** 2)

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"n": self.n, "difference": self.difference, "interval": list(self.interval), "p": self.p}


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


def rivals(
    base: StoredCertification, runs: Iterable[StoredCertification]
) -> tuple[list[StoredCertification], dict[str, str]]:
    """The runs to choose from besides the baseline; and each attack that is no rival of what it attacks, by name, with
    the run that has the same weights and defence."""

    def about(run: StoredCertification) -> tuple[object, ...]:
        """Its weights, defence and threat; how its passes were computed changes none of them."""
        described = run.manifest["identity"].get("defense") or {}
        options = {name: value for name, value in described.items() if name not in ("precision", "compile")}
        return run.weights_sha256, json.dumps(options, sort_keys=True), run.masks, run.patch_sizes, run.native

    found, twins = [base], dict[str, str]()
    for run in sorted(runs, key=lambda run: bool(run.attacks)):
        same = [one for one in found if (one.attacks or run.attacks) and about(one) == about(run)]
        if same and run.weights_sha256 is not None:
            twins[run.name] = same[0].name
        else:
            found.append(run)
    return found[1:], twins


def why_not_paired(base: StoredCertification, run: StoredCertification) -> str | None:
    """Why the images of two runs are not the same ones, or their certificates not the same claim; None if they are."""
    if base.data_sha256 is None or run.data_sha256 is None:
        return "it is not known which images it is about"
    if base.data_sha256 != run.data_sha256:
        return "it is about other images (another data set, split or limit)"
    if base.guarantee != run.guarantee:
        return f"its certificates are {run.guarantee}, the baseline's {base.guarantee}"
    if base.threat != run.threat:
        return f"its certificates are about {run.patch_words}, the baseline's about {base.patch_words}"
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
