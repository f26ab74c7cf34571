"""What is computed from records before it is shown: by class, by margin, by cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import MaxNLocator

from patchproof.records import Rate, Record, rates

BINS = 24
OUTER = 0.5
"""Percent of the values at either end that share the outermost bins, so that one outlier does not squeeze the rest."""


def by_class(records: Iterable[Record]) -> dict[int, dict[str, Rate]]:
    """The three accuracies of each label, in the order of the labels."""
    found: dict[int, list[Record]] = {}
    for record in records:
        found.setdefault(record.label, []).append(record)
    return {label: rates(found[label]) for label in sorted(found)}


@dataclass(frozen=True)
class Histogram:
    """Shares of all n images between consecutive `edges`; `clipped` values lie outside and count in the end bins."""

    edges: tuple[float, ...]
    shares: tuple[tuple[Rate, ...], ...]
    clipped: int


def histogram(groups: Sequence[Sequence[float]], *, n: int, bins: int = BINS) -> Histogram | None:
    """One row of shares a group, over common bins of a round width, one of which begins at 0 if it lies within."""
    values = np.array([value for group in groups for value in group], dtype=np.float64)
    if not len(values):
        return None
    edges = list(map(float, MaxNLocator(bins).tick_values(*np.percentile(values, [OUTER, 100 - OUTER]).tolist())))
    low, high = edges[0], edges[-1]
    counts = [np.histogram(np.clip(group, low, high), edges)[0].tolist() for group in groups]
    clipped = int(((values < low) | (values > high)).sum())
    return Histogram(tuple(edges), tuple(tuple(Rate(k, n) for k in row) for row in counts), clipped)


def quantiles(values: Sequence[float]) -> tuple[float | None, ...]:
    """Smallest, 5%, median, 95%, largest."""
    if not values:
        return (None,) * 5
    return tuple(np.percentile(np.array(values, dtype=np.float64), [0, 5, 50, 95, 100]).tolist())


def margins(records: Iterable[Record], *, certified: bool) -> list[float]:
    return [r.margin for r in records if r.margin is not None and bool(r.certified) == certified]
