"""What benchmarks/README.md says is what was measured."""

from __future__ import annotations

import runpy
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_tables_are_those_of_the_results():
    table = runpy.run_path(str(BENCHMARKS / "table.py"))
    text = (BENCHMARKS / "README.md").read_text("utf-8")
    assert table["filled"](text) == text
    assert table["filled"](text.replace("| 11.3 |", "| 99 |")) == text  # a number typed by hand does not stay
    assert set(table["TABLES"]) == {name for name in table["TABLES"] if f"<!-- table: {name} -->" in text}
