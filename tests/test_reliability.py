"""docs/reliability.md names a test for each promise; the tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text("utf-8")


def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/test_\w+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    missing = [f"{file}::{name}" for file, name in named if name not in functions_in(file)]
    assert not missing


def test_every_row_of_a_promise_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("|---", "| promise"))]
    heads = ("| what happens", "| input")
    assert [row for row in rows if "::test_" not in row and not row.startswith(heads)] == []
