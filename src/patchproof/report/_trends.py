"""What more masks, smaller patches or dearer training gain: certified accuracy against each of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from matplotlib.axes import Axes

from patchproof.report._compare import Entry
from patchproof.report._figures import Picture, draw, error_line, percent_axis
from patchproof.report._text import shortened
from patchproof.training import STRATEGIES

FEW_TICKS = 8
FEW_NAMES = 4
"""As many ticks with numbers, or with names, stand side by side."""


def comparison_pictures(entries: Sequence[Entry]) -> list[Picture]:
    """Certified accuracy against masks per axis, patch size and training cost, where at least two values are there."""
    known = [entry for entry in entries if entry.certified.n]
    found = [
        _against(
            known,
            key="by-masks",
            title="Certified accuracy against masks",
            unit="masks per axis",
            x=lambda e: None if e.run.facts.axes is None else float(max(e.run.facts.axes)),
            rest=lambda e: (e.run.facts.patch_words,),
        ),
        _against(
            known,
            key="by-patch",
            title="Certified accuracy against patch size",
            unit="patch (% of the image's area)",
            x=lambda e: e.run.facts.patch_percent,
            rest=lambda e: (e.run.facts.masks_words,),
        ),
        _against(
            known,
            key="by-training-cost",
            title="Certified accuracy against training cost",
            unit="strategy, and its extra passes an image in training",
            x=lambda e: None if e.training.passes is None else float(e.training.passes),
            rest=lambda e: (e.run.facts.masks_words, e.run.facts.patch_words),
            by_strategy=False,
        ),
    ]
    return [picture for picture in found if picture is not None]


def _against(
    entries: Sequence[Entry],
    *,
    key: str,
    title: str,
    unit: str,
    x: Callable[[Entry], float | None],
    rest: Callable[[Entry], tuple[str, ...]],
    by_strategy: bool = True,
) -> Picture | None:
    """One line for all runs that differ in x alone; None where no two do."""
    lines = _lines(entries, x, rest, by_strategy=by_strategy)
    if not lines:
        return None
    names = _distinct_words(list(lines))
    totals = sorted({entry.certified.n for points in lines.values() for _, entry in points})
    costs = {(value, entry.label) for points in lines.values() for value, entry in points}
    places = {cost: place for place, cost in enumerate(sorted(costs, key=_by_cost))}

    def plot(axes: Axes) -> None:
        for number, (name, points) in enumerate(zip(names, lines.values(), strict=True)):
            rates = [entry.certified for _, entry in points]
            at = [value if by_strategy else float(places[value, entry.label]) for value, entry in points]
            error_line(axes, at, rates, label=name, number=number, of=len(lines), joined=by_strategy)
        if by_strategy:
            _scale_x(axes, [value for points in lines.values() for value, _ in points])
        else:
            _name_x(axes, list(places))
        axes.set(xlabel=unit, ylabel="certified (% of images)")
        percent_axis(axes, (entry.certified for points in lines.values() for _, entry in points))

    n = ", ".join(f"{total:,}" for total in totals)
    alt = f"{title}: {len(lines)} {'lines' if by_strategy else 'rows of points'} with 95% intervals, n = {n}."
    return draw(key, f"{title}, n = {shortened(n, 24)}", alt, plot, height=3.0 + 0.16 * len(lines))


def _scale_x(axes: Axes, found: Sequence[float]) -> None:
    """Room for lines moved aside, and a tick at each value there is, if they are few."""
    values = sorted(set(found))
    aside = 0.12 * (values[-1] - values[0])
    axes.set_xlim(values[0] - aside, values[-1] + aside)
    if len(values) <= FEW_TICKS:
        axes.set_xticks(values, [f"{round(v, 1):g}" for v in values])
        axes.minorticks_off()


def _by_cost(cost: tuple[float, str]) -> tuple[float, int, str]:
    """Cheapest first; of the same cost in the order of the paper's tables."""
    known = list(STRATEGIES)
    return cost[0], known.index(cost[1]) if cost[1] in known else len(known), cost[1]


def _name_x(axes: Axes, costs: Sequence[tuple[float, str]]) -> None:
    """A place for each strategy in the order of its cost, which stands below its name."""
    many = len(costs) > FEW_NAMES
    words = [f"{shortened(name, 14)}{': ' if many else chr(10)}{cost:g}" for cost, name in costs]
    axes.set_xticks(range(len(costs)), words)
    if many:
        axes.tick_params(axis="x", rotation=40)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.5, len(costs) - 0.5)


def _lines(
    entries: Sequence[Entry],
    x: Callable[[Entry], float | None],
    rest: Callable[[Entry], tuple[str, ...]],
    *,
    by_strategy: bool,
) -> dict[tuple[str, ...], list[tuple[float, Entry]]]:
    """Words that name a line -> its points in the order of x. What is not x is the same all along a line."""
    groups: dict[tuple[Hashable, ...], list[tuple[float, Entry]]] = {}
    for entry in entries:
        value = x(entry)
        if value is not None:
            facts = entry.run.facts
            own = (entry.label, facts.weights_sha256) if by_strategy else ("", None)
            same = (*own, facts.data_sha256, facts.native, entry.images, facts.architecture, *rest(entry))
            groups.setdefault(same, []).append((value, entry))
    lines: dict[tuple[str, ...], list[tuple[float, Entry]]] = {}
    for points in groups.values():
        if len({value for value, _ in points}) > 1:
            entry = points[0][1]
            label = (entry.label,) if by_strategy else ()
            words = (*label, entry.images, entry.run.facts.architecture, *rest(entry))
            lines[_unused(words, lines)] = sorted(points, key=lambda point: point[0])
    return lines


def _unused(words: tuple[str, ...], taken: dict[tuple[str, ...], list[tuple[float, Entry]]]) -> tuple[str, ...]:
    """`words`, with a number where another line is called the same."""
    number, name = 1, words
    while name in taken:
        number += 1
        name = (f"{words[0]} (run {number})", *words[1:])
    return name


def _distinct_words(names: Sequence[tuple[str, ...]]) -> list[str]:
    """Only the words in which the lines differ; of a single line, the first."""
    differ = [i for i in range(len(names[0])) if len({name[i] for name in names}) > 1] or [0]
    return [shortened(" · ".join(name[i] for i in differ), 60) for name in names]
