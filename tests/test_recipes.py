"""The paper's rows by name, with the numbers it prints."""

from __future__ import annotations

import pytest

from patchproof.recipes import ARCHITECTURES, find_recipe, matching_recipes, recipes
from patchproof.training import STRATEGIES
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
    assert len(matching_recipes("")) == len(recipes()) == 112
    for recipe in recipes().values():
        assert recipe.settings()["strategy"] in STRATEGIES
        assert recipe.architecture in ARCHITECTURES
        assert recipe.settings()["batch_size"] == ("128" if recipe.dataset == "imagenet" else "64")
        assert {e.masks for e in recipe.expectations} <= {3, 6}
        assert all(0 < e.certified < 100 for e in recipe.expectations)


def test_recipes_are_found_by_wildcard_and_what_the_paper_could_not_train_is_none():
    assert {r.strategy for r in matching_recipes("imagenette-convnext-*")} == {"cutout", "rand", "greedy"}
    with pytest.raises(InputError, match="unknown recipe `imagenet-vit-grid6x6`; did you mean"):
        find_recipe("imagenet-vit-grid6x6")
