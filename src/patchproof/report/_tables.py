"""Tables with their renderings as Markdown, CSV, LaTeX and JSON, and the sections of a page that hold them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby

from patchproof.report._counts import Paired
from patchproof.report._figures import Picture
from patchproof.report._gallery import Cards
from patchproof.runs import Rate

Cell = str | int | float | Rate | Paired | None

SHOWN_ROWS = 10
"""Rows that the page shows of a long table, or from either end of it."""

LONG = 40
"""Most letters of a cell that needs no width of its own."""

BESIDE = 6
"""Most columns that fit beside a figure if the names of the rows are long."""

ROOMY = 8
"""Most columns that fit on the page with wide gaps."""


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}%"


def interval_words(found: Rate | Paired) -> str:
    """`57.3–67.0%` for a rate, `+1.0 to +7.3` in percentage points for a difference."""
    low, high = (100 * end for end in found.interval)
    return f"{low:+z.1f} to {high:+z.1f}" if isinstance(found, Paired) else f"{low:.1f}–{high:.1f}%"


@dataclass(frozen=True)
class Column:
    """A column; `group` is a heading shared with its neighbours, `digits` are the decimals of a float."""

    name: str
    group: str = ""
    digits: int = 1

    @property
    def full_name(self) -> str:
        return f"{self.group}: {self.name}" if self.group else self.name


@dataclass(frozen=True)
class Table:
    """A table; `key` names its files. A `Rate` is shown with its 95% interval, a `Paired` in percentage points."""

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    whole: Table | None = None
    """The complete table for the files, if this is the part that the page shows."""

    @classmethod
    def of(
        cls, key: str, title: str, rows: Sequence[Mapping[str, Cell]], notes: Sequence[str] = (), *, digits: int = 1
    ) -> Table:
        """A table of rows that name their cells, all in the same order."""
        columns = [Column(name, digits=digits) for name in (rows[0] if rows else ())]
        return cls(key, title, columns, [tuple(row.values()) for row in rows], notes)

    def excerpt(self, rows: Sequence[Sequence[Cell]], which: str) -> Table:
        """A part of the rows, with a note that says how they were chosen."""
        if len(rows) == len(self.rows):
            return self
        note = f"The {len(rows)} of {len(self.rows):,} rows {which}; tables/{self.key}.csv has all."
        return replace(self, rows=rows, notes=(*self.notes, note), whole=self)

    def concise(self, hidden: Collection[str] = ()) -> Table:
        """The table without the columns in `hidden`; words that are the same in several rows become one note."""
        kept, same = list[int](), list[str]()
        for i, column in enumerate(self.columns):
            cells = {row[i] for row in self.rows}
            if (i or len(self.rows) > 1) and len(cells) == 1 and isinstance(cell := next(iter(cells)), str | None):
                if cell is not None and column.name not in hidden:
                    same.append(cell if cell.endswith(column.name) else f"{column.name} {cell}")
            elif column.name not in hidden:
                kept.append(i)
        notes = [f"In every row: {', '.join(same)}.", *self.notes] if same else self.notes
        columns, rows = [self.columns[i] for i in kept], [tuple(row[i] for i in kept) for row in self.rows]
        return replace(self, columns=columns, rows=rows, notes=notes, whole=self.whole or self)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The headings above the columns with the number of columns below each; empty if no column has one."""
        found = [(name, len(list(spanned))) for name, spanned in groupby(column.group for column in self.columns)]
        return found if any(name for name, _ in found) else []

    def is_number(self, position: int) -> bool:
        """True for a column of numbers, which are set flush right."""
        values = [row[position] for row in self.rows if row[position] is not None]
        return bool(values) and not any(isinstance(value, str) for value in values)

    @property
    def wide(self) -> bool:
        """True if the table does not fit beside a figure: many columns after long names."""
        return len(self.columns) > BESIDE and any(len(row[0]) > LONG for row in self.texts())

    @property
    def dense(self) -> bool:
        return len(self.columns) > ROOMY

    def texts(self) -> list[list[str]]:
        return [[cell_text(c, column.digits) for c, column in zip(row, self.columns, strict=True)] for row in self.rows]


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, figures, tables and images; `key` is its address in the page.

    `notice` says why images are missing. The tables of a section that is not `shown` are written to files only.
    """

    key: str
    title: str
    words: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    cards: Sequence[Cards] = ()
    notice: str | None = None
    shown: bool = True


def cell_text(cell: Cell, digits: int = 1) -> str:
    """The words of a cell, e.g. `62.3% (57.3–67.0%)` for a rate."""
    if isinstance(cell, Rate | Paired):
        value = percent(cell.rate) if isinstance(cell, Rate) else f"{100 * cell.difference:+.1f}"
        return f"{value} ({interval_words(cell)})" if cell.n else "no images"
    if isinstance(cell, float):
        smallest = 10**-digits
        return f"<{smallest:.{digits}f}" if 0 < cell < smallest / 2 else f"{cell:z,.{digits}f}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return "–" if cell is None else cell


def markdown(table: Table) -> str:
    def escaped(text: str) -> str:
        """Escape what Markdown, or HTML inside it, would read as markup."""
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
"""The columns of CSV for each kind of cell that has several."""


def csv_text(table: Table) -> str:
    """All digits of every number; rates and differences as shares of 1, in several columns."""
    lines: list[list[object]] = [[], *([] for _ in table.rows)]
    for number, column in enumerate(table.columns):
        cells = [row[number] for row in table.rows]
        parts = next((PARTS[type(cell)] for cell in cells if type(cell) in PARTS), ())
        lines[0] += [f"{column.full_name} {part}" for part in parts] or [column.full_name]
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
    """One object per row; rates and differences are objects with the counts behind them."""
    names = [column.full_name for column in table.columns]
    rows = [[c.as_dict() if isinstance(c, Rate | Paired) else c for c in row] for row in table.rows]
    named = [dict(zip(names, row, strict=True)) for row in rows]
    return json.dumps({"title": table.title, "rows": named, "notes": list(table.notes)}, indent=1) + "\n"


TEX = {"\\": "textbackslash", "~": "textasciitilde", "^": "textasciicircum", "<": "textless", ">": "textgreater"}
TEX |= {"|": "textbar", "…": "ldots", "†": "dag"}
LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {character: f"\\{name}{{}}" for character, name in TEX.items()}
    | {"×": r"$\times$", "τ": r"$\tau$", "·": r"$\cdot$", "–": "--"}
)
"""Characters that TeX reads as markup, or that its fonts lack -> how to write them."""


def latex(table: Table) -> str:
    """A `table` environment that needs no packages, with the notes below the rows."""
    kinds = "".join("r" if table.is_number(i) else "l" for i in range(len(table.columns)))
    groups = [rf"\multicolumn{{{span}}}{{l}}{{{name.translate(LATEX)}}}" for name, span in table.groups]
    heads = [column.name.translate(LATEX) for column in table.columns]
    rows = [[text.translate(LATEX) for text in row] for row in table.texts()]
    above, below = ([" & ".join(cells) + r" \\" for cells in some if cells] for some in ((groups, heads), rows))
    notes = [rf"\par {note.translate(LATEX)}" for note in table.notes]
    lines = [r"\begin{table}", rf"\caption{{{table.title.translate(LATEX)}}}", rf"\begin{{tabular}}{{{kinds}}}"]
    lines += [r"\hline", *above, r"\hline", *below, r"\hline", r"\end{tabular}", *notes, r"\end{table}"]
    return "\n".join(lines) + "\n"


RENDERERS = {"md": markdown, "csv": csv_text, "tex": latex, "json": json_text}
"""File ending -> renderer."""
