"""The recipes that the repository offers."""

import pytest

from checkout import ROOT
from paceline.recipe.check import check_recipe
from paceline.recipe.load import load_recipe

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def test_the_recipes_are_found():
    assert {"demo", "extract-s3", "tiny"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_recipe_is_valid_and_named_after_its_file(path):
    recipe = load_recipe(path)
    check_recipe(recipe)
    assert recipe.name == path.stem


def test_the_tiny_recipe_has_every_stage_on_and_only_paths_below_tiny():
    recipe = load_recipe(ROOT / "recipes" / "tiny.yaml")
    assert recipe.regenerate.enabled
    assert recipe.score.budgets
    assert {source.split for source in recipe.corpus.sources} == {"train", "heldout"}
    paths = [recipe.target.path, *(source.path for source in recipe.corpus.sources)]
    assert all("/tiny/" in path for path in paths)
