"""One table, rendered as Markdown, CSV, LaTeX or rows of HTML cells."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patchproof.records import Rate
from patchproof.report._text import rate_words

Cell = str | int | float | Rate | None
RATE_COLUMNS = ("k", "n", "rate", "low", "high")


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
    """`key` names its files; a `Rate` is shown with its exact 95% interval, and written to CSV as five numbers."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wrong = [row for row in self.rows if len(row) != len(self.columns)]
        if wrong:
            raise ValueError(f"table {self.key}: a row has {len(wrong[0])} cells for {len(self.columns)} columns")

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The headings above the columns with how many each spans; empty where no column has one."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            if found and found[-1][0] == column.group and column.group:
                found[-1] = (column.group, found[-1][1] + 1)
            else:
                found.append((column.group, 1))
        return found if any(name for name, _ in found) else []

    def is_number(self, position: int) -> bool:
        """Whether the column holds numbers, which are set flush right."""
        values = [row[position] for row in self.rows if row[position] is not None]
        return bool(values) and not any(isinstance(value, str) for value in values)

    def texts(self) -> list[list[str]]:
        return [[cell_text(c, column.digits) for c, column in zip(row, self.columns, strict=True)] for row in self.rows]


def cell_text(cell: Cell, digits: int = 1) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, Rate):
        return rate_words(cell)
    if isinstance(cell, float):
        return f"{round(cell, digits) + 0.0:,.{digits}f}"  # + 0.0: no minus before a zero
    return f"{cell:,}" if isinstance(cell, int) else cell


def markdown(table: Table) -> str:
    heads = [_markdown_text(column.full_name) for column in table.columns]
    rule = ["---:" if table.is_number(i) else "---" for i in range(len(heads))]
    rows = [[_markdown_text(text) for text in row] for row in table.texts()]
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows)]
    notes = [f"\n{_markdown_text(note)}" for note in table.notes]
    return "\n".join([f"**{_markdown_text(table.title)}**", "", *lines, *notes]) + "\n"


def _markdown_text(text: str) -> str:
    """With the characters escaped that Markdown or the HTML inside it would read as something else."""
    escaped = re.sub(r"([\\`*_\[\]|~])", r"\\\1", text)
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def csv_text(table: Table) -> str:
    """Numbers in full; rates as shares of 1."""
    rates = [any(isinstance(row[i], Rate) for row in table.rows) for i in range(len(table.columns))]
    heads = [name for c, is_rate in zip(table.columns, rates, strict=True) for name in _csv_heads(c, is_rate)]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(heads)
    for row in table.rows:
        writer.writerow(v for c, is_rate in zip(row, rates, strict=True) for v in _csv_cells(c, is_rate))
    return file.getvalue()


def _csv_heads(column: Column, is_rate: bool) -> list[str]:
    return [f"{column.full_name} {part}" for part in RATE_COLUMNS] if is_rate else [column.full_name]


def _csv_cells(cell: Cell, is_rate: bool) -> Sequence[object]:
    if isinstance(cell, Rate):
        return cell.k, cell.n, cell.rate if cell.n else "", *cell.interval
    if is_rate:
        return [""] * len(RATE_COLUMNS)
    return ["" if cell is None else cell]


def latex(table: Table) -> str:
    """A `table` environment without packages; notes go below the rows."""
    kinds = "".join("r" if table.is_number(i) else "l" for i in range(len(table.columns)))
    lines = [r"\begin{table}", rf"\caption{{{_latex_text(table.title)}}}", rf"\begin{{tabular}}{{{kinds}}}", r"\hline"]
    lines += [*_latex_groups(table), _latex_row([column.name for column in table.columns]), r"\hline"]
    lines += [_latex_row(row) for row in table.texts()]
    lines += [r"\hline", r"\end{tabular}"]
    lines += [rf"\par {_latex_text(note)}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def _latex_groups(table: Table) -> Iterator[str]:
    if table.groups:
        yield " & ".join(rf"\multicolumn{{{span}}}{{l}}{{{_latex_text(name)}}}" for name, span in table.groups) + r" \\"


def _latex_row(texts: Sequence[str]) -> str:
    return " & ".join(map(_latex_text, texts)) + r" \\"


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


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


RENDERERS = {"md": markdown, "csv": csv_text, "tex": latex}
"""File ending -> renderer."""
