"""The examples run, and print what they promise; they, the scripts and the benchmarks use public names only."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SHOWN = {
    "certify_own_network.py": r"^[1-9]\d? of 32 images keep their label under any patch of \(10, 10\).*becomes",
    "native_patch.py": r"touches up to 35×35.*touches up to 41×41.*touches up to 55×55",
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_runs_and_may_be_run_again(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = []
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert re.search(SHOWN[name], printed[0], re.DOTALL), printed[0]


@pytest.mark.slow
def test_the_notebook_runs_and_its_training_certifies_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    notebook, names = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text("utf-8")), {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "kept out of the repository"
            exec("".join(cell["source"]), names)
    assert names["greedy"].certified.interval[0] > names["plain"].certified.interval[1]
    assert not names["found"].broken
    assert (tmp_path / names["page"]).is_file()


def imported(source: str) -> set[str]:
    """Every module and name that a program imports, `patchproof.runs.read_run`."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return plain | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def test_scripts_benchmarks_and_examples_use_public_names_only():
    assert imported("from patchproof.cli._setup import x") == {"patchproof.cli._setup.x"}
    for path in [path for folder in ("scripts", "benchmarks", "examples") for path in (ROOT / folder).glob("*.py")]:
        names = [name.split(".") for name in imported(path.read_text("utf-8")) if name.startswith("patchproof")]
        assert not [name for name in names if "cli" in name or any(part.startswith("_") for part in name)], path
