"""What more masks, smaller patches or dearer training gain: certified accuracy against each of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from matplotlib.axes import Axes

from patchproof.report._compare import Entry
from patchproof.report._figures import Picture, draw, error_line
from patchproof.report._text import shortened

FEW_TICKS = 8


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
            unit="extra passes an image in training, forward and backward",
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

    def plot(axes: Axes) -> None:
        for number, (name, points) in enumerate(zip(names, lines.values(), strict=True)):
            rates = [entry.certified for _, entry in points]
            error_line(axes, [value for value, _ in points], rates, label=name, number=number, of=len(lines))
        _scale_x(axes, [point for points in lines.values() for point in points], costs=not by_strategy)
        axes.set(xlabel=unit, ylabel="certified (% of images)", ylim=(-2, 102))

    n = ", ".join(f"{total:,}" for total in totals)
    alt = f"{title}: {len(lines)} lines with 95% intervals, n = {n}."
    return draw(key, f"{title}, n = {shortened(n, 24)}", alt, plot, height=3.0 + 0.16 * len(lines))


def _scale_x(axes: Axes, points: Sequence[tuple[float, Entry]], *, costs: bool) -> None:
    """Room for lines moved aside, and a tick at each value there is, if they are few.

    Costs reach from 0 to 666, so their axis is logarithmic from 1 on, and the strategies stand below them.
    """
    values = sorted({value for value, _ in points})
    aside = 0.12 * (values[-1] - values[0])
    if costs:
        axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(*((values[0] - 0.6, 2 * values[-1]) if costs else (values[0] - aside, values[-1] + aside)))
    if len(values) <= FEW_TICKS:
        below = {value: sorted({entry.label for x, entry in points if x == value}) for value in values if costs}
        axes.set_xticks(values, ["\n".join([f"{round(v, 1):g}", *below.get(v, [])]) for v in values])
        axes.minorticks_off()


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
