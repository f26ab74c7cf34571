"""`patchproof ls`: what there is to choose from, and what has been measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from patchproof.cli._settings import FLAGS, LsSettings
from patchproof.cli._show import Console, interval_text, new_table, percent, print_json, print_table, table_values
from patchproof.data import DATASETS
from patchproof.defenses import DEFENSES, DefenseEntry
from patchproof.models import list_models
from patchproof.recipes import Recipe, matching_recipes
from patchproof.runs import ACCURACIES, Rate, StoredTraining, read_run, run_status
from patchproof.training import STRATEGIES
from patchproof.types import InputError, PatchproofError

DATASET_WORDS = {
    "imagenet": "1,000 classes, 50,000 validation images; <data-dir>/imagenet/val/<wnid>/*.JPEG",
    "imagenette": "ten easy classes of ImageNet, 3,925 validation images; <data-dir>/imagenette2*/val",
    "cifar10": "ten classes, 10,000 test images of 32x32; torchvision's layout, or class folders",
    "cifar100": "a hundred classes, 10,000 test images of 32x32; torchvision's layout, or class folders",
    "svhn": "house numbers, 26,032 test images of 32x32; torchvision's layout, or class folders",
    "fashion-mini": "embedded: 5,000 training and 1,000 test images of Fashion-MNIST, 28x28",
}


def ls(what: str | None, pattern: str | None, settings: LsSettings) -> int:
    what, pattern = what or "runs", pattern or ""
    values: list[Any]
    shown: Table | str
    if what == "models":
        values = list_models(pattern)
        if not values:
            raise InputError(f"no model matches `{pattern}`; try a wildcard such as `*{pattern.strip('*')}*`")
        shown = "\n".join(values)
    elif what == "runs":
        values = runs_below(Path(pattern or "runs"))
        shown = runs_table(values) if values else f"no runs below {pattern or 'runs'}"
    else:
        found = matching_recipes(pattern) if what == "recipes" else []
        shown = recipes_table(found, pattern) if what == "recipes" else words_table(what)
        values = [recipe_facts(recipe) for recipe in found] or table_values(shown)
    console = Console()
    if settings.json:
        print_json(values)
    elif isinstance(shown, str):
        console.plain(shown)
    elif what == "runs":
        print_table(console, shown)
    else:
        console.print(shown)
    return 0


def words_table(what: str) -> Table:
    """The names of one kind of thing, each with what it is in words."""
    title, words = {
        "datasets": ("data set", {name: DATASET_WORDS[name] for name in DATASETS}),
        "defenses": ("defence", {name: defense_words(entry) for name, entry in DEFENSES.items()}),
        "strategies": ("strategy", {name: entry.words for name, entry in STRATEGIES.items()}),
    }[what]
    table = new_table(title, "what it is")
    for row in words.items():
        table.add_row(*map(escape, row))
    return table


def defense_words(entry: DefenseEntry) -> str:
    flags = ", ".join("--" + FLAGS.get(f.name, f.name) for f in fields(entry.options))
    return "; ".join([entry.words, entry.kind.guarantee, *([f"flags: {flags}"] if flags else [])])


def recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """A recipe for programs: what it sets, what it must follow, and what the paper reports for it."""
    expected = [asdict(cell) for cell in recipe.expectations]
    shown = {"defense": recipe.defense, "training": dict(recipe.training), "first": recipe.start}
    return {"recipe": recipe.name, **shown, "expected": expected}


def recipes_table(found: Sequence[Recipe], pattern: str) -> Table:
    """One row per recipe, with the certified accuracies that the paper reports for it."""
    caption = (
        "certified accuracy in the paper, in %: 3×3 masks / 6×6 masks, or of the defence that the recipe names; -: not "
        "in the paper; `first`: train that recipe before, and pass its checkpoint as --weights"
    )
    table = new_table("recipe", "tables", "patch: 3×3 / 6×6", caption=caption)
    table.columns[0].no_wrap = True  # a name is there to be copied
    if not found:
        raise InputError(f"no recipe matches `{pattern}`; try a wildcard such as `imagenette-*`")
    for recipe in found:
        tables = ", ".join(sorted({e.table for e in recipe.expectations}))
        cells = {(e.patch, e.masks): "-" if e.certified is None else e.certified for e in recipe.expectations}
        patches = dict.fromkeys(e.patch for e in recipe.expectations)
        if recipe.defense == "patchcleanser":
            words = [f"{p}: {cells.get((p, 3), '-')} / {cells.get((p, 6), '-')}" for p in patches]
        else:
            words = [f"{e.patch}: {e.certified}" for e in recipe.expectations]
        words += [f"first {recipe.start}"] if recipe.start else []
        table.add_row(recipe.name, tables, "   ".join(words))
    return table


def runs_below(root: Path) -> list[dict[str, Any]]:
    """One row per run: folder, what it measured, accuracies as in results.json (None if unknown), and state."""
    if root.is_file():
        raise InputError(f"{root} is a file, not a folder")
    if not root.is_dir():
        raise InputError(f"no such folder: {root}; `patchproof certify` makes one")
    found = []
    for folder in sorted(path.parent for path in root.rglob("manifest.json")):
        what, rates, status = run_facts(folder)
        counted = {name: rates[name].as_dict() if name in rates else None for name in ACCURACIES}
        found.append({"run": str(folder.relative_to(root)), "what": what, **counted, "status": status})
    return found


def run_facts(folder: Path) -> tuple[str, Mapping[str, Rate], str]:
    try:
        run = read_run(folder)
    except PatchproofError as error:
        return "", {}, f"damaged: {error}"
    if isinstance(run, StoredTraining):
        best = run.best
        rates = {} if best is None else {"undefended": best.undefended, "certified": best.certified}
        return f"train {run.about}, {run.strategy}", rates, run_status(run)
    masks = f", {run.masks_words}" if run.masks else ""
    what = f"{run.manifest['command']} {run.about}, {run.defense}{masks}, {run.patch_words}"
    begun = bool(run.records) or (folder / "results.json").exists()
    return what, run.rates if begun else {}, run_status(run)


def runs_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    numbers = "n", *ACCURACIES, "95% interval"
    table = new_table("run", "what", *numbers, "status", numbers=numbers)
    for row in rows:
        rates = {name: Rate(row[name]["k"], row[name]["n"]) for name in ACCURACIES if row[name]}
        cells = [percent(rates[name].rate) if name in rates and rates[name].n else "" for name in ACCURACIES]
        certified = rates.get("certified")
        count = str(certified.n) if certified else ""
        interval = interval_text(certified) if certified and certified.n else ""
        table.add_row(escape(row["run"]), escape(row["what"]), count, *cells, interval, escape(row["status"]))
    return table
