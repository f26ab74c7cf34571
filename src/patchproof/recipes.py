"""Training recipes by name, with the numbers that papers report for them.

There is one recipe for every row of the paper's Tables 1, 2, 3 and A1 (embedded/paper_tables.csv), one for each family
of defences on CIFAR-10 at its native 32 pixels, and some of our own.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import cache
from importlib.resources import files
from typing import Any

from patchproof.types import InputError


@dataclass(frozen=True)
class Architecture:
    """One of the paper's networks: timm's name, its weights, and the learning rate for fine-tuning."""

    model: str
    weights: str
    learning_rate: float


ARCHITECTURES: Mapping[str, Architecture] = {
    "resnet": Architecture("resnetv2_50x1_bit", "goog_distilled_in1k", 0.01),
    "vit": Architecture("vit_base_patch16_224", "augreg_in21k_ft_in1k", 0.001),
    "convnext": Architecture("convnext_tiny", "fb_in22k_ft_in1k", 0.001),
}


@dataclass(frozen=True)
class Expectation:
    """One cell of a paper's table: percentages for this patch and mask set; `defended` is the paper's clean accuracy.

    A cell that no paper reports has no table and no percentages.
    """

    table: str
    patch: str
    masks: int | None
    defended: float | None = None
    certified: float | None = None


@dataclass(frozen=True)
class Recipe:
    """The settings of a training, and the defence to certify the network with at every expectation's patch and masks.

    If `start` names another recipe, that one is trained first.
    """

    name: str
    training: Mapping[str, Any]
    expectations: tuple[Expectation, ...]
    defense: str = "patchcleanser"
    options: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None

    def options_for(self, expected: Expectation) -> dict[str, Any]:
        """The options of the defence for this expectation."""
        return {**self.options} if expected.masks is None else {**self.options, "per_axis": expected.masks}


FIELD: Mapping[str, Any] = {
    "dataset": "cifar10",
    "strategy": "none",
    "epochs": 40,
    "batch_size": 512,
    "schedule": "cosine",
    "warmup_epochs": 2.0,
    "augment": "shift",
    "mask_patch": "5px",
    "validation_images": 200,
    "precision": "bf16",
    "compile": True,
    "keep_decoded": True,
}
"""The settings that all recipes on CIFAR-10 at 32 pixels share, unless they say otherwise."""

SGD: Mapping[str, Any] = {"learning_rate": 0.1, "weight_decay": 5e-4}
ADAMW: Mapping[str, Any] = {"optimizer": "adamw", "learning_rate": 0.001, "weight_decay": 0.05}
VIEWS = {"strategy": "column4", "views": 4, "validate_with": "derandomized-smoothing"}
SMOOTHING = {"model": "resnet18_ablated", **VIEWS, **SGD}
VIT = {"model": "vit_patch4_32", "drop_tokens": True, **VIEWS, **ADAMW}
MASKED = {"model": "resnet18_32", **SGD}
TUNED = {**MASKED, "epochs": 6, "warmup_epochs": 0.5, "learning_rate": 0.05}
BAGNET = {"model": "bagnet5_wide", "validate_with": "bagcert"}
BAGCERT = {**BAGNET, "loss": "bagcert", "epochs": 120, "warmup_epochs": 0.5, **ADAMW, "learning_rate": 0.004}
IBP = {
    "model": "cnn_ibp",
    "loss": "ibp",
    "validate_with": "ibp",
    **ADAMW,
    "weight_decay": 0.0,
    "epochs": 70,
    "precision": "tf32",
    "validation_images": 10,
}


def _field(
    title: str,
    training: Mapping[str, Any],
    small: tuple[float, float],
    large: tuple[float, float],
    *,
    defense: str | None = None,
    start: str | None = None,
    **options: Any,
) -> Recipe:
    """A network of a defence's family on CIFAR-10 at 32 pixels, trained from random weights or from those of `start`.

    `small` and `large` are the clean and certified accuracies of Table 1 for 2×2 and for 5×5 pixels; most of the
    networks behind them are larger or pretrained.
    """
    masks = options.get("per_axis")
    cells = (Expectation("1", "2px", masks, *small), Expectation("1", "5px", masks, *large))
    weights = {"weights": "random"} if start is None else {}
    return Recipe(f"cifar10-32px-{title}", {**FIELD, **weights, **training}, cells, defense or title, options, start)


PLAIN = Recipe("cifar10-32px-plain", {**FIELD, "weights": "random", **MASKED, "epochs": 34}, ())
CLEANSER: Mapping[str, Any] = {"defense": "patchcleanser", "per_axis": 6, "start": PLAIN.name}
FIELD_RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _field("derandomized-smoothing", SMOOTHING, (83.9, 68.9), (83.9, 56.2), ablation="column", band=4),
        _field("smoothed-vit", VIT, (90.8, 78.1), (90.8, 67.6), band=4, stride=1),
        _field("patchguard-smoothing", SMOOTHING, (84.7, 69.2), (84.6, 57.7), ablation="column", band=4),
        _field("clipped-bagnet", BAGCERT, (84.2, 44.2), (84.2, 9.3)),
        _field("patchguard-bagnet", BAGCERT, (84.5, 63.8), (83.9, 47.3)),
        _field("bagcert", BAGCERT, (86.0, 72.9), (86.0, 60.0)),
        _field("ibp", IBP, (65.8, 51.9), (47.8, 30.8)),
        PLAIN,
        _field("patchcleanser-cutout", {**TUNED, "strategy": "cutout"}, (97.7, 86.1), (97.5, 77.8), **CLEANSER),
        _field("patchcleanser-greedy", {**TUNED, "strategy": "greedy"}, (97.7, 90.8), (97.5, 84.3), **CLEANSER),
    )
}
"""One recipe for each defence of the paper's Table 1, and two strategies for PatchCleanser, which begin with PLAIN.

All networks are trained for 40 epochs, including those of the recipe they begin with, but for the two losses that
still fall then: 120 epochs of the margin of `bagcert`, 70 of interval bounds.
"""

MEMORY: Mapping[str, Any] = {"strategy": "memory", "memory_tries": "2,2,2,1", "schedule": "cosine", "ema": 0.99}
LITE0: Mapping[str, Any] = {
    "model": "tf_efficientnet_lite0",
    "weights": "zoo",
    "dataset": "imagenette",
    **MEMORY,
    "memory_refresh": 8,
    "epochs": 32,
    "batch_size": 256,
    "learning_rate": 0.04,
    "start_share": 0.15,
    "augment": "light",
    "precision": "bf16",
    "compile": True,
    "keep_decoded": True,
}
SMALL: Mapping[str, Any] = {
    "model": "small",
    "dataset": "fashion-mini",
    "schedule": "cosine",
    "warmup_epochs": 0.5,
    "learning_rate": 0.05,
    "weight_decay": 5e-4,
    "validation_images": 100,
}
BEGUN = {"weights": "random", "strategy": "none", "epochs": 2, "learning_rate": 0.1}


def _own(name: str, training: Mapping[str, Any], *patches: str, start: str | None = None) -> Recipe:
    cells = tuple(Expectation("", patch, masks) for patch in patches for masks in (3, 6))
    return Recipe(name, training, cells, start=start)


OWN_RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _own("imagenette-lite0-memory", LITE0, "3%"),
        _own("imagenette-lite0-memory8", {**LITE0, "memory_refresh": 0, "epochs": 8}, "3%"),
        _own("fashion-small-plain", {**SMALL, **BEGUN}),
        *(
            _own(f"fashion-small-{training['strategy']}", {**SMALL, **training}, "5px", start="fashion-small-plain")
            for training in (
                {"strategy": "cutout", "epochs": 3},
                {"strategy": "greedy", "epochs": 3},
                {**MEMORY, "epochs": 6},
            )
        ),
    )
}
"""Recipes that compare `memory` with `greedy` (docs/howto/strategy.md); `patchproof demo` trains the small ones."""


@cache
def recipes() -> Mapping[str, Recipe]:
    """The recipes of the paper, one for each row of its tables of numbers."""
    text = files("patchproof").joinpath("embedded/paper_tables.csv").read_text("utf-8")
    cells: dict[tuple[str, str, str], dict[tuple[str, int], Expectation]] = {}
    for row in csv.DictReader(text.splitlines()):
        key, patch, masks = (row["dataset"], row["architecture"], row["strategy"]), row["patch"], int(row["masks"])
        defended = float(row["defended"]) if row["defended"] else None
        cell = Expectation(row["table"], patch, masks, defended, float(row["certified"]))
        # Of a cell in two tables, the first has the clean accuracy too; their certified accuracies agree.
        cells.setdefault(key, {}).setdefault((patch, masks), cell)
    found = {}
    for dataset, architecture, strategy in sorted(cells):
        name = f"{dataset}-{architecture}-{strategy}"
        training = {
            **asdict(ARCHITECTURES[architecture]),
            "dataset": dataset,
            "strategy": strategy,
            "batch_size": 128 if dataset == "imagenet" else 64,
        }
        found[name] = Recipe(name, training, tuple(cells[dataset, architecture, strategy].values()))
    return found


def every_recipe() -> Mapping[str, Recipe]:
    return {**recipes(), **FIELD_RECIPES, **OWN_RECIPES}


def find_recipe(name: str) -> Recipe:
    """The recipe of this name, or an error that names the nearest one."""
    known = every_recipe()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else "`patchproof ls recipes` shows them all"
    raise InputError(f"unknown recipe `{name}`; {hint}")


def needs_training(defense: str, undefended: float, defended: float) -> str | None:
    """Advice if a defence is right less than half as often as the classifier alone: the recipe that trains for it."""
    recipe = FIELD_RECIPES.get(f"cifar10-32px-{defense}")
    if recipe is None or recipe.defense != defense or 2 * defended >= undefended:
        return None
    how = ", ".join(f"{k} {recipe.training[k]}" for k in ("model", "strategy", "loss") if k in recipe.training)
    return (
        f"`{defense}` needs a network trained for it: with it this one is right on {defended:.1%}, alone on "
        f"{undefended:.1%}; the recipe {recipe.name} trains one ({how})"
    )


def matching_recipes(pattern: str) -> list[Recipe]:
    """The recipes whose names match a wildcard; all of them if it is empty."""
    return [recipe for name, recipe in every_recipe().items() if fnmatch(name, pattern or "*")]
