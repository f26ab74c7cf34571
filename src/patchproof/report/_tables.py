"""Tables, rendered as Markdown, CSV, LaTeX, JSON or rows of HTML cells; and the sections of a page, which hold them."""

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
NOTHING = "–"

SHOWN_CLASSES = 20
SHOWN_FAILURES = 10
"""Rows of long tables that the page has."""

COMMON = (
    *("data set", "split", "architecture", "defence", "guarantee", "masks", "patch", "images"),
    *("certified by", "best epoch chosen on"),
)
"""Columns that become a note where they are the same in every row."""


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}%"


def interval_words(found: Rate | Paired) -> str:
    """`57.3–67.0%` of a rate, `+1.0 to +7.3` percentage points of a difference."""
    low, high = (100 * end for end in found.interval)
    return f"{low:+.1f} to {high:+.1f}" if isinstance(found, Paired) else f"{low:.1f}–{high:.1f}%"


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
        cls, key: str, title: str, rows: Sequence[Mapping[str, Cell]], notes: Sequence[str] = (), *, digits: int = 1
    ) -> Table:
        """From rows that name their cells, all in the same order."""
        columns = [Column(name, digits=digits) for name in (rows[0] if rows else ())]
        return cls(key, title, columns, [tuple(row.values()) for row in rows], notes)

    def excerpt(self, rows: Sequence[Sequence[Cell]], which: str) -> Table:
        """These rows alone, unless they are all; the note says by what they were chosen."""
        if len(rows) == len(self.rows):
            return self
        note = f"The {len(rows)} of {len(self.rows):,} with the {which}; tables/{self.key}.csv has all."
        return replace(self, rows=rows, notes=(*self.notes, note), whole=self)

    def concise(self, elsewhere: Collection[str] = ()) -> Table:
        """Without the columns shown `elsewhere`, and those that are the same in every row, which become one note."""
        shown = [(i, column) for i, column in enumerate(self.columns) if column.name not in elsewhere]
        same = {
            column.name: cell_text(self.rows[0][i])
            for i, column in shown
            if column.name in COMMON and len({row[i] for row in self.rows}) == 1
        }
        kept = [i for i, column in shown if column.name not in same]
        known = {name: text for name, text in same.items() if text != NOTHING}
        said = ", ".join(text if text.endswith(name) else f"{name} {text}" for name, text in known.items())
        said = f"The same for all: {said}" if len(self.rows) > 1 else said[:1].upper() + said[1:]
        rows = [tuple(row[i] for i in kept) for row in self.rows]
        marked = any("†" in str(cell) for row in rows for cell in row)
        notes = [f"{said}."] if known else []
        notes += [note for note in self.notes if marked or not note.startswith("†")]
        columns = [self.columns[i] for i in kept]
        return replace(self, columns=columns, rows=rows, notes=notes, whole=self.whole or self)

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


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, figures, tables and images below it; `key` is its address in the page.

    `notice` says why images are missing. If it is not `shown`, its tables are files all the same.
    """

    key: str
    title: str
    words: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    cards: Sequence[Cards] = ()
    notice: str | None = None
    wide: bool = False
    shown: bool = True


def cell_text(cell: Cell, digits: int = 1) -> str:
    """A rate as `62.3% (57.3–67.0%)`; no percentage of nothing."""
    if isinstance(cell, Rate | Paired):
        value = percent(cell.rate) if isinstance(cell, Rate) else f"{100 * cell.difference:+.1f}"
        return f"{value} ({interval_words(cell)})" if cell.n else "no images"
    if isinstance(cell, float):
        if 0 < cell < 0.5 * 10**-digits:
            return f"<{10**-digits:.{digits}f}"
        return f"{cell:z,.{digits}f}"
    return NOTHING if cell is None else f"{cell:,}" if isinstance(cell, int) else cell


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
    rows = [[c.as_dict() if isinstance(c, Rate | Paired) else c for c in row] for row in table.rows]
    named = [dict(zip(names, row, strict=True)) for row in rows]
    return json.dumps({"title": table.title, "rows": named, "notes": list(table.notes)}, indent=1) + "\n"


LATEX = str.maketrans(
    {
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
    }
    | {character: f"\\{character}" for character in "&%$#_{}"}
)


def latex(table: Table) -> str:
    """A `table` environment without packages; notes go below the rows."""
    kinds = "".join("r" if table.is_number(i) else "l" for i in range(len(table.columns)))
    groups = [rf"\multicolumn{{{span}}}{{l}}{{{name.translate(LATEX)}}}" for name, span in table.groups]
    heads = [column.name.translate(LATEX) for column in table.columns]
    rows = [[text.translate(LATEX) for text in row] for row in table.texts()]
    above, below = ([" & ".join(cells) + r" \\" for cells in some if cells] for some in ((groups, heads), rows))
    lines = [r"\begin{table}", rf"\caption{{{table.title.translate(LATEX)}}}", rf"\begin{{tabular}}{{{kinds}}}"]
    lines += [r"\hline", *above, r"\hline", *below, r"\hline", r"\end{tabular}"]
    lines += [rf"\par {note.translate(LATEX)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


RENDERERS = {"md": markdown, "csv": csv_text, "tex": latex, "json": json_text}
"""File ending -> renderer."""
