"""Several certifications side by side, in the layout of the paper's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from patchproof.records import ACCURACIES, Rate
from patchproof.report._lineage import Training
from patchproof.report._paper import PaperNumber, paper_numbers
from patchproof.report._runs import CertifyRun
from patchproof.report._tables import Cell, Column, Table, cell_text
from patchproof.report._text import percent
from patchproof.training import STRATEGIES

NO_NAME = "† The training strategy is not known: the name is that of the folder of the first run with these weights."
COMMON = ("data set", "architecture", "masks", "patch", "images")
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


def concise(table: Table) -> Table:
    """Without the columns of facts that are the same in every row: a note says them once, and the accuracies fit."""
    facts = [i for i, column in enumerate(table.columns) if column.name in COMMON]
    same = [i for i in facts if len({row[i] for row in table.rows}) == 1]
    if len(table.rows) < 2 or not same:
        return table
    said = ", ".join(f"{table.columns[i].name} {cell_text(table.rows[0][i])}" for i in same)
    kept = [i for i in range(len(table.columns)) if i not in same]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    columns = tuple(table.columns[i] for i in kept)
    return Table(table.key, table.title, columns, rows, (f"The same for all: {said}.", *table.notes))


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
