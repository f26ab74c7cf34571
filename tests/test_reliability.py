"""docs/reliability.md names a test for each promise; the tests are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text("utf-8")


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/test_\w+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    tests = {f"tests/{path.name}": path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    known = {(file, name) for file, text in tests.items() for name in re.findall(r"^def (\w+)", text, flags=re.M)}
    assert sorted(set(named) - known) == []


def test_every_row_of_a_promise_names_a_test():
    heads = ("|---", "| promise", "| what happens", "| input")
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(heads)]
    assert [row for row in rows if "::test_" not in row] == []
