"""Numbers counted from records: by outcome, class and mask, under attack, and for two runs on the same images.

Two runs on the same images share most of what makes their separate intervals wide. Their difference comes from the
images on which they differ: those `gained` only by the second run and those `lost` only by the first.
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
"""Most classes that a figure names; of more classes it shows the distribution."""

FEW_PER_CLASS = 5
"""Fewest images per class, on average, for which results of many classes are shown by class."""

FEW = 10
"""Fewest images of a class for which the class is called weak."""

Z = 1.959963984540054
"""Normal quantile of a two-sided 95% interval."""

POWER = 0.8416212335729143
"""Normal quantile of 80%: a difference is found four times in five."""

LEVEL = 0.05
"""Differences with a smaller p are called clear."""


def outcomes(run: StoredCertification) -> dict[str, list[Record]]:
    return {
        "certified": [record for record in run.good if record.certified],
        "not certified": [record for record in run.good if not record.certified],
    }


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
    """The numbers of the masks that decided the certificate, and the label predicted under them.

    A mask that hides two places counts as its parts. Without a witness that fits the run: no masks and None.
    """
    found = record.evidence.get("witness")
    if run.masks is None or not isinstance(found, Mapping):
        return (), None
    masks, label = found.get("masks"), found.get("label")
    if not isinstance(masks, list) or not all(type(n) is int and 0 <= n < len(run.masks) for n in masks):
        return (), None
    numbers = [run.masks.blocks.index(rect) for number in masks for rect in run.masks.parts[number]]
    return tuple(dict.fromkeys(numbers)), label if isinstance(label, int) else None


def mask_shares(run: StoredCertification, records: Sequence[Record]) -> dict[int, Rate]:
    """For each mask, the share of these images that it helped to decide; the most frequent mask first."""
    decided = [masks for record in records if (masks := witness(run, record)[0])]
    found = Counter(number for masks in decided for number in masks)
    ordered = sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))
    return {number: Rate(k, len(decided)) for number, k in ordered}


def attacked_rates(run: StoredCertification) -> dict[str, Rate]:
    """The five accuracies over the records of an attack.

    An image that was not attacked counts with its clean answer, so that the rate stays an upper bound. An accuracy
    that no record knows is left out.
    """
    found = Tally(ATTACK_ACCURACIES).add(run.attacks).rates()
    for name, clean in (("undefended_attacked", "undefended"), ("attacked", "defended")):
        if found[name].n:
            answers = [r.finding(clean) if r.finding(name) is None else r.finding(name) for r in run.attacks]
            found[name] = Rate(sum(map(bool, answers)), len(answers))
    return {name: rate for name, rate in found.items() if rate.n}


@dataclass(frozen=True)
class Paired:
    """Numbers of images for which a finding holds in both runs, only the first, only the second, and neither."""

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
        """95% interval from two Wilson intervals and their correlation (Newcombe 1998, method 10)."""
        n = self.n
        if not n:
            return -1.0, 1.0
        first, second = self.both + self.lost, self.both + self.gained
        (below1, above1), (below2, above2) = wilson_reach(first, n), wilson_reach(second, n)
        product = first * (n - first) * second * (n - second)
        together: float = self.both * self.neither - self.lost * self.gained
        if together > 0:
            together = max(together - n / 2, 0)  # continuity correction
        phi = together / math.sqrt(product) if product else 0.0
        below = math.sqrt(max(0.0, below2 * below2 - 2 * phi * below2 * above1 + above1 * above1))
        above = math.sqrt(max(0.0, above2 * above2 - 2 * phi * above2 * below1 + below1 * below1))
        return max(-1.0, self.difference - below), min(1.0, self.difference + above)

    @property
    def p(self) -> float:
        """McNemar's exact test: the chance of a split at least as uneven if both runs are equally good."""
        differing = self.lost + self.gained
        return min(1.0, 2 * float(bdtr(min(self.lost, self.gained), differing, 0.5))) if differing else 1.0

    @property
    def images_needed(self) -> int | None:
        """Number of images that show a difference of this size four times in five; None if there is no difference."""
        if self.lost == self.gained:
            return None
        differing, d = (self.lost + self.gained) / self.n, abs(self.difference)
        return math.ceil(((Z * math.sqrt(differing) + POWER * math.sqrt(max(0.0, differing - d * d))) / d) ** 2)

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"n": self.n, "difference": self.difference, "interval": list(self.interval), "p": self.p}


def wilson_reach(k: int, n: int) -> tuple[float, float]:
    """Distances from k / n to the lower and the upper end of Wilson's 95% interval."""
    middle, square = 2 * k + Z * Z, Z * math.sqrt(Z * Z + 4 * k * (n - k) / n)
    scale = 2 * (n + Z * Z)
    return k / n - (middle - square) / scale, (middle + square) / scale - k / n


def count_pairs(findings: Iterable[tuple[bool | None, bool | None]]) -> Paired:
    """Count the images for which both findings are known."""
    counts = Counter(findings)
    return Paired(counts[True, True], counts[True, False], counts[False, True], counts[False, False])


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for testing all of them together (Holm 1979)."""
    adjusted, worst = [1.0] * len(values), 0.0
    for rank, number in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        worst = max(worst, min(1.0, (len(values) - rank) * values[number]))
        adjusted[number] = worst
    return adjusted


@dataclass(frozen=True)
class Comparison:
    """A run against the baseline on their common images: each accuracy, and certified accuracy by label.

    `corrected` holds Holm's p-values of the accuracies, over all runs that are compared together.
    """

    base: StoredCertification
    run: StoredCertification
    accuracies: Mapping[str, Paired]
    classes: Mapping[int, Paired]
    corrected: dict[str, float] = field(default_factory=dict)

    @property
    def certified(self) -> Paired:
        return self.accuracies["certified"]


def compare(base: StoredCertification, *runs: StoredCertification) -> list[Comparison]:
    """Compare each run with the baseline, image by image; `why_not_paired` must be None for all of them."""
    found = []
    for run in runs:
        others = {record.index: record for record in run.good}
        pairs = [(record, others[record.index]) for record in base.good if record.index in others]
        names = [name for name in base.rates if name in run.rates]
        accuracies = {name: count_pairs((a.finding(name), b.finding(name)) for a, b in pairs) for name in names}
        labels: dict[int, list[tuple[bool | None, bool | None]]] = {}
        for a, b in pairs:
            labels.setdefault(a.label, []).append((a.certified, b.certified))
        found.append(Comparison(base, run, accuracies, {label: count_pairs(labels[label]) for label in sorted(labels)}))
    for name in base.rates:
        tested = [c for c in found if name in c.accuracies]
        for c, p in zip(tested, holm([c.accuracies[name].p for c in tested]), strict=True):
            c.corrected[name] = p
    return found


def why_not_paired(base: StoredCertification, run: StoredCertification) -> str | None:
    """Why two runs cannot be compared image by image, or their certificates claim different things; None if they can
    be compared."""
    if base.data_sha256 is None or run.data_sha256 is None:
        return "it is not known which images it is about"
    if base.data_sha256 != run.data_sha256:
        return "it is about other images (another data set, split or limit)"
    if base.guarantee != run.guarantee:
        return f"its certificates are {run.guarantee}, the baseline's {base.guarantee}"
    if base.threat != run.threat:
        return f"its certificates are about {run.patch_words}, the baseline's about {base.patch_words}"
    if not {record.index for record in base.good} & {record.index for record in run.good}:
        return "no image was certified in both"
    return None


def rivals(
    base: StoredCertification, runs: Iterable[StoredCertification]
) -> tuple[list[StoredCertification], dict[str, str]]:
    """The runs to choose from besides the baseline, and the attacks on one of them: name of the attack -> name of the
    run with the same weights, defence and threat. Attacking a defence does not make another one."""

    def about(run: StoredCertification) -> tuple[object, ...]:
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
