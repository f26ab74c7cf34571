"""Recipes hold the paper's numbers, and can be trained and certified."""

from __future__ import annotations

import pytest

from patchproof.cli import _layers, build_app
from patchproof.cli._runs import trained
from patchproof.cli._settings import SETTINGS, part
from patchproof.cli._show import Console
from patchproof.defenses import DEFENSES, defense
from patchproof.geometry import PatchThreat
from patchproof.models import load_classifier
from patchproof.recipes import (
    ARCHITECTURES,
    FIELD_RECIPES,
    OWN_RECIPES,
    find_recipe,
    matching_recipes,
    needs_training,
    recipes,
)
from patchproof.training import STRATEGIES, Plan
from patchproof.training.losses import LOSSES
from patchproof.types import InputError

CELLS = [
    ("imagenet-vit-cutout", "3%", 6, 58.1),  # the abstract
    ("imagenet-vit-greedy", "3%", 6, 62.3),
    ("imagenet-vit-greedy", "3%", 3, 57.7),
    ("cifar10-convnext-rand", "35px", 6, 81.9),  # Table 1
    ("imagenette-resnet-cutout", "3%", 3, 91.6),
    ("svhn-resnet-cutout", "35px", 3, 43.4),  # Table 2
    ("cifar100-resnet-gutout6x6", "35px", 6, 51.7),  # Table 3
    ("svhn-vit-grid6x6", "35px", 6, 78.1),  # Table A1
]


@pytest.mark.parametrize(("name", "patch", "masks", "certified"), CELLS)
def test_cells_are_those_of_the_paper(name, patch, masks, certified):
    assert {(e.patch, e.masks): e.certified for e in find_recipe(name).expectations}[patch, masks] == certified


def test_every_recipe_names_things_that_exist():
    assert len(recipes()) == 112
    assert len(matching_recipes("")) == 112 + len(FIELD_RECIPES) + len(OWN_RECIPES)
    for recipe in recipes().values():
        assert recipe.training["strategy"] in STRATEGIES
        assert recipe.training["model"] in {network.model for network in ARCHITECTURES.values()}
        assert recipe.training["batch_size"] == (128 if recipe.training["dataset"] == "imagenet" else 64)
        assert {e.masks for e in recipe.expectations} <= {3, 6}
        assert all(0 < e.certified < 100 for e in recipe.expectations)


def test_recipes_are_found_by_wildcard_and_a_missing_row_of_the_paper_has_none():
    assert {r.training["strategy"] for r in matching_recipes("imagenette-convnext-*")} == {"cutout", "rand", "greedy"}
    with pytest.raises(InputError, match="unknown recipe `imagenet-vit-grid6x6`; did you mean"):
        find_recipe("imagenet-vit-grid6x6")


def test_every_family_of_defences_has_a_recipe_that_can_be_trained_and_certified():
    """The command line accepts every recipe's settings; the network fits its loss, and the defence fits the network."""
    families = {recipe.defense for recipe in FIELD_RECIPES.values()}
    assert families == set(DEFENSES) - {"alarm"}
    epochs = {name: recipe.training["epochs"] for name, recipe in FIELD_RECIPES.items()}
    for recipe in FIELD_RECIPES.values():
        total = epochs[recipe.name] + (epochs[recipe.start] if recipe.start else 0)
        longer = {"bagcert": 120, "ibp": 70}.get(str(recipe.training.get("loss")), 40)
        assert total == longer or not recipe.expectations
    cells = {name: [e.certified for e in recipe.expectations] for name, recipe in FIELD_RECIPES.items()}
    assert cells["cifar10-32px-derandomized-smoothing"] == [68.9, 56.2]
    assert cells["cifar10-32px-bagcert"] == [72.9, 60.0]
    for name in families - {"patchcleanser"}:
        assert f"the recipe cifar10-32px-{name} trains one" in str(needs_training(name, 0.9, 0.4))
    for name, recipe in {**FIELD_RECIPES, **OWN_RECIPES}.items():
        tokens = ["train", "--recipe", name]
        kind, layers = _layers(tokens)
        app = build_app({**SETTINGS, "train": kind})
        app.config = tuple(layers)
        _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        settings = bound.arguments["settings"]
        if recipe.start:
            first = f"`patchproof train --recipe {recipe.start} --output runs/{recipe.start}`, then add --weights runs/"
            with pytest.raises(InputError, match=first):
                trained(settings, Console())
        plan = part(settings, Plan)
        assert plan.epochs == recipe.training["epochs"]
        classifier = load_classifier(recipe.training["model"], "random")
        threat = PatchThreat.square(image_size=classifier.input_size, pixels=5)
        LOSSES[str(plan.loss)](classifier, threat)
        defense(plan.validate_with, classifier, threat)
        for expected in recipe.expectations:
            assert defense(recipe.defense, classifier, threat, **recipe.options_for(expected)).name == recipe.defense
