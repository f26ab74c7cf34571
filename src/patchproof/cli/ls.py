"""`patchproof ls`: what there is to choose from, and what has been measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from patchproof.cli._settings import FLAGS, LsSettings
from patchproof.cli._show import Console, interval_text, new_table, percent, print_json, print_table, table_values
from patchproof.data import DATASETS
from patchproof.defenses import DEFENSES, DefenseEntry
from patchproof.models import list_models
from patchproof.recipes import matching_recipes
from patchproof.runs import ACCURACIES, Rate, StoredTraining, Tally, one_answer, read_run
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
    if what == "runs":
        found = runs_below(Path(pattern or "runs"))
        if settings.json:
            print_json(list(map(run_values, found)))
        elif not found:
            console.print(f"no runs below {escape(pattern or 'runs')}", highlight=False, soft_wrap=True)
        else:
            print_table(console, runs_table(found))
        return 0
    if what == "recipes":
        table = recipes_table(pattern)
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
    else:
        console.print(table)
    return 0


def defense_words(entry: DefenseEntry) -> str:
    flags = ", ".join("--" + FLAGS.get(f.name, f.name) for f in fields(entry.options))
    return "; ".join([entry.words, entry.kind.guarantee, *([f"flags: {flags}"] if flags else [])])


def recipes_table(pattern: str) -> Table:
    """One row per recipe, with the certified accuracies that the paper reports for it."""
    caption = (
        "certified accuracy in the paper, in %: 3×3 masks / 6×6 masks, or of the defence that the recipe names; -: the "
        "paper has none; "
        "`first`: train that recipe before, and pass its checkpoint as --weights"
    )
    table = new_table("recipe", "tables", "patch: 3×3 / 6×6", caption=caption)
    table.columns[0].no_wrap = True  # a name is there to be copied
    found = matching_recipes(pattern)
    if not found:
        raise InputError(f"no recipe matches `{pattern}`; try a wildcard such as `imagenette-*`")
    for recipe in found:
        tables = ", ".join(sorted({e.table for e in recipe.expectations}))
        cells = {(e.patch, e.masks): "-" if e.certified is None else e.certified for e in recipe.expectations}
        patches = dict.fromkeys(e.patch for e in recipe.expectations)
        words = "   ".join(f"{p}: {cells.get((p, 3), '-')} / {cells.get((p, 6), '-')}" for p in patches)
        if recipe.defense != "patchcleanser":
            words = "   ".join(f"{e.patch}: {e.certified}" for e in recipe.expectations)
        first = f"first {recipe.start}" if recipe.start else ""
        table.add_row(recipe.name, tables, "   ".join(filter(None, (words, first))))
    return table


class RunRow(NamedTuple):
    """A run's folder, what it measured, its accuracies counted from its records, and whether they cover the whole data
    set."""

    run: str
    what: str
    rates: Mapping[str, Rate]
    status: str


def runs_below(root: Path) -> list[RunRow]:
    if not root.is_dir():
        raise InputError(f"no such folder: {root}; `patchproof certify` makes one")
    folders = sorted(path.parent for path in root.rglob("manifest.json"))
    return [RunRow(str(folder.relative_to(root)), *_run_facts(folder)) for folder in folders]


def runs_table(rows: Iterable[RunRow]) -> Table:
    numbers = "n", *ACCURACIES, "95% interval"
    table = new_table("run", "what", *numbers, "status", numbers=numbers)
    for run, what, rates, status in rows:
        certified = rates.get("certified")
        counted = [percent(rates[name].rate) if name in rates and rates[name].n else "" for name in ACCURACIES]
        interval = interval_text(certified) if certified and certified.n else ""
        n = str(certified.n) if certified else ""
        table.add_row(escape(run), escape(what), n, *counted, interval, escape(status))
    return table


def run_values(row: RunRow) -> dict[str, Any]:
    """For programs: each accuracy as in results.json, null where the run has none."""
    counted = {name: row.rates[name].as_dict() if name in row.rates else None for name in ACCURACIES}
    return {"run": row.run, "what": row.what, **counted, "status": row.status}


def _run_facts(folder: Path) -> tuple[str, Mapping[str, Rate], str]:
    try:
        run = read_run(folder)
    except PatchproofError as error:
        return "", {}, f"damaged: {error}"
    unfinished = "running" if being_written(folder) else "stopped"
    if isinstance(run, StoredTraining):
        best = run.best
        whole = (folder / "results.json").exists() and not any(notice.startswith("partial") for notice in run.notices)
        state = "trained" if whole else unfinished
        rates = {} if best is None else {"undefended": best.undefended, "certified": best.certified}
        doubts = [n if n.startswith("partial") else n.partition(": ")[0] for n in run.notices]
        doubts += ["one class"] if best and best.one_class else []
        status = "; ".join([f"{state} ({'no ' * (best is None)}validation)", *doubts])
        return f"train {run.about}, {run.strategy}", rates, status
    masks = [run.masks_words] if run.masks else []
    what = ", ".join([f"{run.manifest['command']} {run.about}", run.defense, *masks, run.patch_words])
    planned = run.planned or len(run.records)
    if not run.records and not (folder / "results.json").exists():
        return what, {}, f"{unfinished}; 0 of {planned} done"
    status = "complete" if len(run.good) == run.available else "partial"
    if len(run.records) < planned:
        status = f"{unfinished}; {len(run.records)} of {planned} done"
    if run.guarantee != "recovery":
        status += f", {run.guarantee}"
    attacked = Tally(["attacked"]).add(run.attacks).rates()["attacked"]
    if attacked.n:
        status += f", attacked {percent(attacked.rate)}"
    doubts = [notice.partition(": ")[0] for notice in run.notices if not notice.startswith("partial")]
    doubts += ["one class"] if one_answer(run.good) else []
    return what, run.rates, "; ".join([status, *doubts])
