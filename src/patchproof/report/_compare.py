"""Several certifications side by side: the paper's table layout, and what more masks or smaller patches gain."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from matplotlib.axes import Axes

from patchproof.records import ACCURACIES, Rate
from patchproof.report._figures import Picture, draw, error_line
from patchproof.report._lineage import Training
from patchproof.report._paper import PaperNumber, paper_numbers
from patchproof.report._runs import CertifyRun
from patchproof.report._tables import Cell, Column, Table
from patchproof.report._text import percent, shortened
from patchproof.training import STRATEGIES

FEW_TICKS = 8
NO_NAME = "† The training strategy is not known; the row has the name of the run's folder."
CONTEXT = (
    "Paper: the number printed in the paper this project implements. In brackets, with the network it is about: "
    "another architecture or input size than ours, shown for context and not as a comparison."
)


@dataclass(frozen=True)
class Entry:
    """A run with how its classifier was trained."""

    run: CertifyRun
    training: Training

    @property
    def label(self) -> str:
        return self.training.label if self.training.strategy else f"{self.training.label} †"

    @property
    def certified(self) -> Rate:
        return self.run.rates["certified"]

    @property
    def images(self) -> str:
        """Which images, in words."""
        return f"{self.run.facts.dataset}, n = {self.certified.n:,}"

    @cached_property
    def paper(self) -> list[PaperNumber]:
        return paper_numbers(self.run.facts, self.training.strategy)

    @property
    def setting(self) -> str:
        """The column of the paper's layout that the run belongs to."""
        facts = self.run.facts
        return f"{facts.dataset} · {facts.architecture} · {facts.masks_words} · {facts.patch_words}"


def runs_table(entries: Sequence[Entry]) -> Table:
    """One row a run, with everything that tells it from the others."""
    heads = ("run", "strategy", "data set", "architecture", "masks", "patch", "images")
    columns = (*map(Column, heads), *map(Column, ACCURACIES), Column("passes an image"), Column("seconds"))
    rows = tuple((*_identity(entry), *_numbers(entry)) for entry in entries)
    return Table("runs", "The runs", columns, rows, _notes(entries, paper=False))


def _identity(entry: Entry) -> tuple[Cell, ...]:
    facts = entry.run.facts
    where = facts.dataset, facts.architecture, facts.masks_words, facts.patch_words
    return entry.run.name, entry.label, *where, entry.certified.n


def _numbers(entry: Entry) -> tuple[Cell, ...]:
    good = entry.run.good
    passes = sum(record.forwards for record in good) / len(good) if good else None
    return *(entry.run.rates[name] for name in ACCURACIES), passes, entry.run.seconds


def paper_table(entries: Sequence[Entry]) -> Table:
    """Rows are strategies; each setting has columns for the defended and the certified accuracy, and the paper's."""
    settings = list(dict.fromkeys(entry.setting for entry in entries))
    cells = _cells(entries)
    labels = sorted({row for row, _ in cells}, key=_row_order)
    columns, picks = [Column("strategy")], []
    for setting in settings:
        for name, pick in _setting_columns([e for e in entries if e.setting == setting]):
            columns.append(Column(name, group=setting))
            picks.append((setting, pick))
    rows = tuple((_row_name(row), *(_cell(cells.get((row, s)), pick) for s, pick in picks)) for row in labels)
    return Table("comparison", "Defended and certified accuracy", tuple(columns), rows, _notes(entries, paper=True))


Pick = Callable[[Entry], Cell]
Row = tuple[str, int]


def _cells(entries: Sequence[Entry]) -> dict[tuple[Row, str], Entry]:
    """Entries by row and setting; a second run of the same strategy in the same setting goes to a second row."""
    cells: dict[tuple[Row, str], Entry] = {}
    for entry in entries:
        number = 1
        while ((entry.label, number), entry.setting) in cells:
            number += 1
        cells[(entry.label, number), entry.setting] = entry
    return cells


def _row_order(row: Row) -> tuple[int, str, int]:
    """Strategies in the paper's order, then the rest by name."""
    known = list(STRATEGIES)
    return known.index(row[0]) if row[0] in known else len(known), *row


def _row_name(row: Row) -> str:
    return row[0] if row[1] == 1 else f"{row[0]} (run {row[1]})"


def _setting_columns(entries: Sequence[Entry]) -> list[tuple[str, Pick]]:
    columns: list[tuple[str, Pick]] = [("defended", lambda entry: entry.run.rates["defended"])]
    if any(number.defended is not None for entry in entries for number in entry.paper):
        columns.append(("paper", lambda entry: paper_words(entry.paper, "defended")))
    columns.append(("certified", lambda entry: entry.certified))
    if any(entry.paper for entry in entries):
        columns.append(("paper", lambda entry: paper_words(entry.paper, "certified")))
    return columns


def _cell(entry: Entry | None, pick: Pick) -> Cell:
    return None if entry is None else pick(entry)


def paper_words(numbers: Sequence[PaperNumber], name: str) -> str | None:
    """`93.7%` for the same network, `(ResNet 93.7%, ViT 95.5%)` for others."""
    own = [getattr(n, name) for n in numbers if n.context is None]
    if own and own[0] is not None:
        return percent(own[0] / 100)
    others = [f"{n.context} {percent(getattr(n, name) / 100)}" for n in numbers if getattr(n, name) is not None]
    return f"({', '.join(others)})" if others else None


def _notes(entries: Sequence[Entry], *, paper: bool) -> tuple[str, ...]:
    notes = ["Rates with exact 95% intervals."]
    if paper and any(entry.paper for entry in entries):
        notes.append(CONTEXT)
    if any(entry.training.strategy is None for entry in entries):
        notes.append(NO_NAME)
    return tuple(notes)


def mixed_notices(entries: Sequence[Entry]) -> list[str]:
    """What keeps the runs from being compared number by number."""
    facts = [entry.run.facts for entry in entries]
    if len({f.data_sha256 for f in facts}) > 1:
        sets = ", ".join(sorted({f.dataset for f in facts}))
        return [f"mixed: the runs are not about the same images ({sets}); compare only within a data set"]
    notices = []
    if len({frozenset(r.index for r in entry.run.good) for entry in entries}) > 1:
        counts = ", ".join(sorted({f"{entry.certified.n:,}" for entry in entries}))
        notices.append(f"mixed: the runs cover different images of the same data set (n = {counts})")
    if len({f.native for f in facts}) > 1:
        notices.append("mixed: some patches are measured on the original image, others at the network input")
    return notices


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
