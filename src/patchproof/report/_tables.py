"""One table, rendered as Markdown, CSV, LaTeX, JSON or rows of HTML cells; numbers in words, the same everywhere."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from patchproof.report._paired import Paired
from patchproof.runs import Rate

Cell = str | int | float | Rate | Paired | None


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}%"


def interval_words(rate: Rate) -> str:
    low, high = rate.interval
    return f"{100 * low:.1f}–{percent(high)}"


def points_interval(paired: Paired) -> str:
    """`+1.0 to +7.3`, in percentage points."""
    low, high = paired.interval
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


def duration(seconds: float) -> str:
    """In the two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@dataclass(frozen=True)
class Column:
    """`group` is a heading above neighbouring columns that share it; `digits` are those shown of a float."""

    name: str
    group: str = ""
    digits: int = 1

    @property
    def full_name(self) -> str:
        return f"{self.group}: {self.name}" if self.group else self.name


@dataclass(frozen=True)
class Table:
    """`key` names its files; a `Rate` is shown with its exact 95% interval, and written to CSV as five numbers; so is
    `Paired`, as a difference in percentage points."""

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    whole: Table | None = None
    """The table of which the page shows this part; its files have all of it."""

    @classmethod
    def of(
        cls,
        key: str,
        title: str,
        rows: Sequence[Mapping[str, Cell]],
        notes: Sequence[str] = (),
        *,
        digits: int = 1,
        leave_out: Collection[str] = (),
    ) -> Table:
        """From rows that name their cells, all in the same order; some of them may be left out."""
        names = [name for name in rows[0] if name not in leave_out] if rows else []
        columns = [Column(name, digits=digits) for name in names]
        return cls(key, title, columns, [tuple(row[name] for name in names) for row in rows], notes)

    def without(self, names: Collection[str]) -> Table:
        """The part without these columns."""
        kept = [i for i, column in enumerate(self.columns) if column.name not in names]
        rows = [tuple(row[i] for i in kept) for row in self.rows]
        return replace(self, columns=[self.columns[i] for i in kept], rows=rows, whole=self.whole or self)

    def first(self, count: int, which: str) -> Table:
        """The first rows alone, if there are more; the note says by what they were chosen."""
        if len(self.rows) <= count:
            return self
        note = f"The {count} of {len(self.rows):,} with the {which}; tables/{self.key}.csv has all."
        return replace(self, rows=self.rows[:count], notes=(*self.notes, note), whole=self)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The headings above the columns with how many each spans; empty where no column has one."""
        found = [(name, len(list(spanned))) for name, spanned in groupby(column.group for column in self.columns)]
        return found if any(name for name, _ in found) else []

    def is_number(self, position: int) -> bool:
        """Whether the column holds numbers, which are set flush right."""
        values = [row[position] for row in self.rows if row[position] is not None]
        return bool(values) and not any(isinstance(value, str) for value in values)

    def texts(self) -> list[list[str]]:
        return [[cell_text(c, column.digits) for c, column in zip(row, self.columns, strict=True)] for row in self.rows]


def cell_text(cell: Cell, digits: int = 1) -> str:
    """A rate as `62.3% (57.3–67.0%)`; no percentage of nothing."""
    if cell is None:
        return "–"
    if isinstance(cell, Rate):
        return f"{percent(cell.rate)} ({interval_words(cell)})" if cell.n else "no images"
    if isinstance(cell, Paired):
        return f"{100 * cell.difference:+.1f} ({points_interval(cell)})" if cell.n else "no images"
    if isinstance(cell, float):
        if 0 < cell < 0.5 * 10**-digits:
            return f"<{10**-digits:.{digits}f}"
        return f"{round(cell, digits) + 0.0:,.{digits}f}"  # + 0.0: no minus before a zero
    return f"{cell:,}" if isinstance(cell, int) else cell


def markdown(table: Table) -> str:
    def escaped(text: str) -> str:
        """Without what Markdown, or the HTML inside it, would read as something else."""
        return escape(re.sub(r"([\\`*_\[\]|~])", r"\\\1", text), quote=False)

    heads = [escaped(column.full_name) for column in table.columns]
    rule = ["---:" if table.is_number(i) else "---" for i in range(len(heads))]
    rows = [[escaped(text) for text in row] for row in table.texts()]
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]
    notes = [f"\n{escaped(note)}" for note in table.notes]
    return "\n".join([f"**{escaped(table.title)}**", "", *lines, *notes]) + "\n"


PARTS: dict[type, tuple[str, ...]] = {
    Rate: ("k", "n", "rate", "low", "high"),
    Paired: ("gained", "lost", "n", "difference", "low", "high", "p"),
}
"""Cells that become several columns of CSV."""


def csv_text(table: Table) -> str:
    """Numbers in full; rates and differences as shares of 1, in several columns."""
    heads: list[object] = []
    lines: list[list[object]] = [heads, *([] for _ in table.rows)]
    for number, column in enumerate(table.columns):
        cells = [row[number] for row in table.rows]
        parts = next((PARTS[type(cell)] for cell in cells if type(cell) in PARTS), ())
        heads += [f"{column.full_name} {part}" for part in parts] or [column.full_name]
        for line, cell in zip(lines[1:], cells, strict=True):
            if isinstance(cell, Rate | Paired):
                values = cell.as_dict() | dict(zip(("low", "high"), cell.interval, strict=True))
                line += [values[part] if cell.n or part in ("k", "n") else "" for part in parts]
            else:
                line += [""] * len(parts) if parts else ["" if cell is None else cell]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()


def json_text(table: Table) -> str:
    """One object per row; rates and differences as objects of their own, with what they were counted from."""
    names = [column.full_name for column in table.columns]
    rows = [
        {n: c.as_dict() if isinstance(c, Rate | Paired) else c for n, c in zip(names, row, strict=True)}
        for row in table.rows
    ]
    return json.dumps({"title": table.title, "rows": rows, "notes": list(table.notes)}, indent=1) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "×": r"$\times$",
    "τ": r"$\tau$",
    "–": "--",
    "…": r"\ldots{}",
    "†": r"\dag{}",
    "·": r"$\cdot$",
} | {character: f"\\{character}" for character in "&%$#_{}"}


def latex(table: Table) -> str:
    """A `table` environment without packages; notes go below the rows."""

    def escaped(text: str) -> str:
        return "".join(_LATEX.get(character, character) for character in text)

    kinds = "".join("r" if table.is_number(i) else "l" for i in range(len(table.columns)))
    groups = [rf"\multicolumn{{{span}}}{{l}}{{{escaped(name)}}}" for name, span in table.groups]
    heads = [escaped(column.name) for column in table.columns]
    body = [[escaped(text) for text in row] for row in table.texts()]
    lines = [r"\begin{table}", rf"\caption{{{escaped(table.title)}}}", rf"\begin{{tabular}}{{{kinds}}}", r"\hline"]
    lines += [" & ".join(cells) + r" \\" for cells in ([groups] if groups else []) + [heads]] + [r"\hline"]
    lines += [" & ".join(cells) + r" \\" for cells in body] + [r"\hline", r"\end{tabular}"]
    lines += [rf"\par {escaped(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


RENDERERS = {"md": markdown, "csv": csv_text, "tex": latex, "json": json_text}
"""File ending -> renderer."""
