"""The examples run, and print what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, capsys) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_certify_own_network(capsys):
    shown = run("certify_own_network.py", capsys)
    assert "of 16 answers cannot be changed by any (10, 10) patch" in shown
    assert "45 without early exit" in shown


def test_native_patch(capsys):
    shown = run("native_patch.py", capsys)
    assert "touches up to 35×35" in shown
    assert "touches up to 41×41" in shown
    assert "touches up to 55×55" in shown


def test_every_example_is_run_here():
    tested = {"certify_own_network.py", "native_patch.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested
