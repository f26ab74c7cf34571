"""`patchproof ls`: what there is to choose from, and what has been measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from patchproof.cli._show import interval_text, percent
from patchproof.cli._terminal import Console
from patchproof.data import DATASETS
from patchproof.models import list_models
from patchproof.recipes import Recipe, matching_recipes
from patchproof.records import ACCURACIES, Rate, RunFolder, read_json
from patchproof.training import STRATEGIES
from patchproof.types import CheckError, InputError

DATASET_WORDS = {
    "imagenet": "1,000 classes, 50,000 validation images; <data-dir>/imagenet/val/<wnid>/*.JPEG",
    "imagenette": "ten easy classes of ImageNet, 3,925 validation images; <data-dir>/imagenette2*/val",
    "cifar10": "ten classes, 10,000 test images of 32x32; torchvision's layout, or class folders",
    "cifar100": "a hundred classes, 10,000 test images of 32x32; torchvision's layout, or class folders",
    "svhn": "house numbers, 26,032 test images of 32x32; torchvision's layout, or class folders",
    "fashion-mini": "embedded: 5,000 training and 1,000 test images of Fashion-MNIST, 28x28",
}


def ls(what: Literal["models", "datasets", "strategies", "recipes", "runs"] = "runs", pattern: str = "", /) -> int:
    """List models, data sets, masking strategies, the paper's recipes, or the runs below a folder.

    Parameters
    ----------
    what
        What to list.
    pattern
        For models and recipes a wildcard such as `vit*`, for runs the folder to look below (default: runs).
    """
    console = Console()
    if what == "models":
        _list_models(console, pattern)
    elif what == "datasets":
        console.print(_two_columns("data set", {name: DATASET_WORDS[name] for name in DATASETS}))
    elif what == "strategies":
        console.print(_two_columns("strategy", {n: e.words for n, e in STRATEGIES.items()}))
    elif what == "recipes":
        console.print(recipes_table(pattern))
    else:
        console.print(runs_table(Path(pattern or "runs")))
    return 0


def _list_models(console: Console, pattern: str) -> None:
    names = list_models(pattern)
    if not names:
        raise InputError(f"no model matches `{pattern}`; try a wildcard such as `*{pattern.strip('*')}*`")
    for name in names:
        console.print(name, highlight=False)


def recipes_table(pattern: str) -> Table:
    """One row a recipe, with the certified accuracies that the paper reports for it."""
    table = Table(header_style="bold", caption="certified accuracy in the paper, in %: 3×3 masks / 6×6 masks")
    for name in ("recipe", "tables", "patch: 3×3 / 6×6"):
        table.add_column(name, overflow="fold")
    found = matching_recipes(pattern)
    if not found:
        raise InputError(f"no recipe matches `{pattern}`; try a wildcard such as `imagenette-*`")
    for recipe in found:
        tables = ", ".join(sorted({e.table for e in recipe.expectations}))
        table.add_row(recipe.name, tables, _expected_words(recipe))
    return table


def _expected_words(recipe: Recipe) -> str:
    cells = {(e.patch, e.masks): e.certified for e in recipe.expectations}
    patches = dict.fromkeys(e.patch for e in recipe.expectations)
    return "   ".join(f"{p}: {cells.get((p, 3), '-')} / {cells.get((p, 6), '-')}" for p in patches)


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
        manifest, results = read_json(folder / "manifest.json"), RunFolder(folder).results()
        if manifest["command"] == "train":
            return _training_row(results)
        if results is None:
            done = len(RunFolder(folder).records(repair=False))
            return [str(done), "", "", "", "", f"stopped; {done} done of {manifest['identity']['images']}"]
        found = {name: Rate(results[name]["k"], results[name]["n"]) for name in ACCURACIES}
    except (CheckError, KeyError, TypeError) as error:
        return ["", "", "", "", "", f"damaged: {escape(str(error))}"]
    rates = [percent(found[name].rate) for name in ACCURACIES]
    return [str(found["certified"].n), *rates, interval_text(found["certified"]), results["status"]]


def _training_row(results: dict[str, Any] | None) -> list[str]:
    """Validation at the best epoch; training has no defended accuracy."""
    if results is None:
        return ["", "", "", "", "", "training stopped"]
    best = results["best"]
    certified = Rate(best["certified"]["k"], best["certified"]["n"])
    undefended = percent(best["undefended"]["rate"])
    return [str(certified.n), undefended, "", percent(certified.rate), interval_text(certified), "trained (validation)"]
