"""The recipes in the package: their headers, configs and plans."""

from __future__ import annotations

import re

import pytest

from tests.support.published_models import NUM_PARAMETERS
from tests.support.recipes import ARCHITECTURES, estimate_recipe, expected_of, model_name
from thresher.builders.hardware import find_gpu
from thresher.config import load_config
from thresher.recipes.catalog import DIRECTORY, Recipe, all_recipes

RECIPES = all_recipes()
EACH = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


@EACH
def test_a_header_says_where_a_recipe_is_from_and_what_it_needs(recipe: Recipe):
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", recipe.name)
    assert recipe.title
    assert re.match(r"[\w.-]+/[\w.-]+, \S+", recipe.source)
    assert all(isinstance(each, str) for each in recipe.differs)
    assert find_gpu(recipe.gpu).name == recipe.gpu
    assert recipe.gigabytes
    assert recipe.hours


@EACH
def test_a_recipe_is_a_config_for_the_gpus_of_its_header(recipe: Recipe):
    config = load_config(DIRECTORY / f"{recipe.name}.yaml")
    assert config.actor_train.num_processes == recipe.num_gpus
    assert recipe.nodes == 1 or config.num_gpus_per_node == recipe.gpus_per_node
    assert config.output_dir == f"output/{recipe.name}"
    assert config.unused_settings == []


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@EACH
def test_the_expected_memory_and_hours_of_a_recipe_are_those_of_its_plan(recipe: Recipe, models):
    estimate = estimate_recipe(recipe, models)
    total, published = estimate.known.size.parameters.total, NUM_PARAMETERS[ARCHITECTURES[model_name(recipe)]]
    assert total == pytest.approx(published, rel=0.05)
    assert estimate.fits
    assert recipe.expected == expected_of(estimate), "run scripts/update-recipes"
