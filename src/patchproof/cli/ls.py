"""`patchproof ls`: what there is to choose from, and what has been measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from patchproof.cli._show import interval_text, percent
from patchproof.data import DATASETS
from patchproof.models import list_models
from patchproof.records import ACCURACIES, Rate, RunFolder, read_json
from patchproof.training import STRATEGIES
from patchproof.types import CheckError, InputError


def ls(what: Literal["models", "datasets", "strategies", "runs"] = "runs", pattern: str = "", /) -> int:
    """List models, data sets, masking strategies, or the runs below a folder.

    Parameters
    ----------
    what
        What to list.
    pattern
        For models a wildcard such as `vit*`, for runs the folder to look below (default: runs).
    """
    console = Console()
    if what == "models":
        _list_models(console, pattern)
    elif what == "datasets":
        console.print(_two_columns("data set", {name: known.description for name, known in DATASETS.items()}))
    elif what == "strategies":
        console.print(_two_columns("strategy", {name: entry.words for name, entry in STRATEGIES.items()}))
    else:
        console.print(runs_table(Path(pattern or "runs")))
    return 0


def _list_models(console: Console, pattern: str) -> None:
    names = list_models(pattern)
    if not names:
        raise InputError(f"no model matches `{pattern}`; try a wildcard such as `*{pattern.strip('*')}*`")
    for name in names:
        console.print(name, highlight=False)


def _two_columns(title: str, rows: dict[str, str]) -> Table:
    table = Table(header_style="bold")
    table.add_column(title)
    table.add_column("what it is")
    for name, words in rows.items():
        table.add_row(name, escape(words))
    return table


def run_folders(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        raise InputError(f"no such folder: {root}; `patchproof certify` makes one")
    yield from sorted(path.parent for path in root.rglob("manifest.json"))


def runs_table(root: Path) -> Table:
    """One row a run: its three accuracies and whether they cover the whole data set."""
    table = Table(header_style="bold")
    for name in ("run", "n", *ACCURACIES, "95% interval", "status"):
        table.add_column(name, justify="left" if name in ("run", "status") else "right", overflow="fold")
    for folder in run_folders(root):
        table.add_row(escape(str(folder.relative_to(root))), *_run_row(folder))
    return table


def _run_row(folder: Path) -> list[str]:
    try:
        results = RunFolder(folder).results()
        if results is None:
            done = len(RunFolder(folder).records())
            planned = read_json(folder / "manifest.json")["identity"]["images"]
            return [str(done), "", "", "", "", f"stopped; {done} done of {planned}"]
        found = {name: Rate(results[name]["k"], results[name]["n"]) for name in ACCURACIES}
    except (CheckError, KeyError, TypeError) as error:
        return ["", "", "", "", "", f"damaged: {escape(str(error))}"]
    rates = [percent(found[name].rate) for name in ACCURACIES]
    return [str(found["certified"].n), *rates, interval_text(found["certified"]), results["status"]]
