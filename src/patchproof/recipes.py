"""Every row of the paper's Tables 1, 2, 3 and A1 by name, with the numbers it reports (embedded/paper_tables.csv)."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from importlib.resources import files

from patchproof.types import InputError


@dataclass(frozen=True)
class Architecture:
    """One of the paper's networks: timm's name and weights, and the learning rate it is fine-tuned with."""

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
    """One cell of a table: at this patch and mask set, these percentages; `defended` is the paper's clean accuracy."""

    table: str
    patch: str
    masks: int
    defended: float | None
    certified: float


@dataclass(frozen=True)
class Recipe:
    """Fine-tune `architecture` on `dataset` with `strategy`, then certify at every expectation's patch and masks."""

    dataset: str
    architecture: str
    strategy: str
    expectations: tuple[Expectation, ...]

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.architecture}-{self.strategy}"

    def settings(self) -> dict[str, object]:
        """What `patchproof train` is told."""
        network = ARCHITECTURES[self.architecture]
        return {
            "model": network.model,
            "weights": network.weights,
            "dataset": self.dataset,
            "strategy": self.strategy,
            "learning_rate": network.learning_rate,
            "batch_size": "128" if self.dataset == "imagenet" else "64",
        }


@cache
def recipes() -> Mapping[str, Recipe]:
    """All of them, derived from the table of the paper's numbers."""
    text = files("patchproof").joinpath("embedded/paper_tables.csv").read_text("utf-8")
    cells: dict[tuple[str, str, str], dict[tuple[str, int], Expectation]] = {}
    for row in csv.DictReader(text.splitlines()):
        key, patch, masks = (row["dataset"], row["architecture"], row["strategy"]), row["patch"], int(row["masks"])
        defended = float(row["defended"]) if row["defended"] else None
        found = Expectation(row["table"], patch, masks, defended, float(row["certified"]))
        # A cell that two tables print is the one with the clean accuracy beside it; they agree on the other number.
        cells.setdefault(key, {}).setdefault((patch, masks), found)
    made = [Recipe(*key, tuple(cells[key].values())) for key in sorted(cells)]
    return {recipe.name: recipe for recipe in made}


def find_recipe(name: str) -> Recipe:
    if name in recipes():
        return recipes()[name]
    near = difflib.get_close_matches(name, recipes(), n=1)
    hint = f"did you mean `{near[0]}`?" if near else "`patchproof ls recipes` shows them all"
    raise InputError(f"unknown recipe `{name}`; {hint}")


def matching_recipes(pattern: str) -> list[Recipe]:
    return [recipe for name, recipe in recipes().items() if fnmatch(name, pattern or "*")]
