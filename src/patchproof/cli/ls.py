"""`patchproof ls`: what there is to choose from, and what has been measured."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from patchproof.cli._settings import FLAGS, LsSettings
from patchproof.cli._show import Console, interval_text, new_table, percent, print_json, print_table, table_values
from patchproof.data import DATASETS
from patchproof.defenses import DEFENSES, DefenseEntry
from patchproof.models import list_models
from patchproof.recipes import matching_recipes
from patchproof.runs import ACCURACIES, StoredTraining, Tally, read_run
from patchproof.runs._folder import being_written
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
    console = Console()
    if what == "models":
        names = list_models(pattern)
        if not names:
            raise InputError(f"no model matches `{pattern}`; try a wildcard such as `*{pattern.strip('*')}*`")
        if settings.json:
            print_json(names)
        for name in () if settings.json else names:
            console.print(name, highlight=False, soft_wrap=True)
        return 0
    if what == "recipes":
        table = recipes_table(pattern)
    elif what == "runs":
        table = runs_table(Path(pattern or "runs"))
    else:
        title, rows = {
            "datasets": ("data set", {name: DATASET_WORDS[name] for name in DATASETS}),
            "defenses": ("defence", {name: defense_words(entry) for name, entry in DEFENSES.items()}),
            "strategies": ("strategy", {name: entry.words for name, entry in STRATEGIES.items()}),
        }[what]
        table = new_table(title, "what it is")
        for row in rows.items():
            table.add_row(*map(escape, row))
    if settings.json:
        print_json(table_values(table))
    elif what == "runs":
        print_table(console, table)
    else:
        console.print(table)
    return 0


def defense_words(entry: DefenseEntry) -> str:
    flags = ", ".join("--" + FLAGS.get(f.name, f.name) for f in fields(entry.options))
    return "; ".join([entry.words, entry.kind.guarantee, *([f"flags: {flags}"] if flags else [])])


def recipes_table(pattern: str) -> Table:
    """One row per recipe, with the certified accuracies that the paper reports for it."""
    caption = (
        "certified accuracy in the paper, in %: 3×3 masks / 6×6 masks, or of the defence that the recipe names; "
        "`first`: train that recipe before, and pass its checkpoint as --weights"
    )
    table = new_table("recipe", "tables", "patch: 3×3 / 6×6", caption=caption)
    table.columns[0].no_wrap = True  # a name is there to be copied
    found = matching_recipes(pattern)
    if not found:
        raise InputError(f"no recipe matches `{pattern}`; try a wildcard such as `imagenette-*`")
    for recipe in found:
        tables = ", ".join(sorted({e.table for e in recipe.expectations}))
        cells = {(e.patch, e.masks): e.certified for e in recipe.expectations}
        patches = dict.fromkeys(e.patch for e in recipe.expectations)
        words = "   ".join(f"{p}: {cells.get((p, 3), '-')} / {cells.get((p, 6), '-')}" for p in patches)
        if recipe.defense != "patchcleanser":
            words = "   ".join(f"{e.patch}: {e.certified}" for e in recipe.expectations)
        first = f"first {recipe.start}" if recipe.start else ""
        table.add_row(recipe.name, tables, "   ".join(filter(None, (words, first))))
    return table


def runs_table(root: Path) -> Table:
    """One row per run: its three accuracies, counted from its records, and whether they cover the whole data set."""
    if not root.is_dir():
        raise InputError(f"no such folder: {root}; `patchproof certify` makes one")
    numbers = "n", *ACCURACIES, "95% interval"
    table = new_table("run", "what", *numbers, "status", numbers=numbers)
    for folder in sorted(path.parent for path in root.rglob("manifest.json")):
        table.add_row(escape(str(folder.relative_to(root))), *_run_row(folder))
    return table


def _run_row(folder: Path) -> list[str]:
    nothing = [""] * (len(ACCURACIES) + 2)
    try:
        run = read_run(folder)
    except PatchproofError as error:
        return ["", *nothing, f"damaged: {escape(str(error))}"]
    unfinished = "running" if being_written(folder) else "stopped"
    if isinstance(run, StoredTraining):
        best, what = run.best, f"train, {escape(run.strategy)}"
        whole = (folder / "results.json").exists() and not any(notice.startswith("partial") for notice in run.notices)
        state = "trained" if whole else unfinished
        status = escape("; ".join([f"{state} ({'no ' * (best is None)}validation)", *run.notices]))
        if best is None:
            return [what, *nothing, status]
        rates = percent(best.undefended.rate), "", percent(best.certified.rate)
        return [what, str(best.certified.n), *rates, interval_text(best.certified), status]
    masks = [run.masks_words] if run.masks else []
    what = escape(", ".join([run.manifest["command"], run.defense, *masks, run.patch_words]))
    counted = [percent(run.rates[name].rate) if name in run.rates and run.good else "" for name in ACCURACIES]
    planned = run.planned or len(run.records)
    if not run.records and not (folder / "results.json").exists():
        return [what, *nothing, f"{unfinished}; 0 of {planned} done"]
    status = "complete" if len(run.good) == run.available else "partial"
    if len(run.records) < planned:
        status = f"{unfinished}; {len(run.records)} of {planned} done"
    if run.guarantee != "recovery":
        status += f", {run.guarantee}"
    attacked = Tally(["attacked"]).add(run.attacks).rates()["attacked"]
    if attacked.n:
        status += f", attacked {percent(attacked.rate)}"
    doubts = [notice.partition(": ")[0] for notice in run.notices if not notice.startswith("partial")]
    status = escape("; ".join([status, *doubts]))
    certified = run.rates["certified"]
    return [what, str(certified.n), *counted, interval_text(certified) if certified.n else "", status]
