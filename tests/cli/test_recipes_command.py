"""`thresher recipes ls`, `show` and `copy`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from tests.support.recipes import without_hub
from thresher.recipes.catalog import DIRECTORY, all_recipes

RECIPES = all_recipes()


@pytest.mark.parametrize("columns", [80, 120])
def test_ls_shows_every_recipe_in_one_line(columns, command_line, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = command_line("recipes", "ls").out.splitlines()
    assert max(map(len, lines)) <= columns
    for recipe, line in zip(RECIPES, lines[2:], strict=False):
        name, model, *others = line.split()
        assert name == recipe.name
        assert recipe.model.rpartition("/")[2].startswith(model.rstrip("…"))
        expected = f"{recipe.losses} {recipe.num_gpus} {recipe.gpu} {recipe.gigabytes} {recipe.hours}"
        assert " ".join(others) == expected
    assert "No recipe was run on a GPU." in lines[-1]


def test_ls_filters_by_name_model_data_and_loss(command_line):
    found = {
        "ZEPHYR-7b-f": "zephyr-7b-full",
        "Meta-Llama": "simpo-v2",
        "kto": "qwen2-0.5b-kto",
        "_binarized": "zephyr-7b-full",
    }
    for word, name in found.items():
        listed = command_line("recipes", "ls", word).out
        assert name in listed
        assert "tulu3-8b" not in listed
    unknown = command_line("recipes", "ls", "parrot")
    assert unknown.code == 2
    assert "no recipe has 'parrot'" in unknown.err


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_config_show_fills_in_the_defaults_of_a_recipe(recipe, command_line):
    shown = command_line("config", "show", DIRECTORY / f"{recipe.name}.yaml")
    assert shown.code == 0, shown.err
    assert yaml.safe_load(shown.out)["pretrain"] == recipe.values["pretrain"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


# plan searches meshes: seconds for several nodes
@pytest.mark.parametrize(
    "recipe", [pytest.param(r, id=r.name, marks=[pytest.mark.hand] if r.nodes > 1 else []) for r in RECIPES]
)
def test_plan_says_that_a_recipe_fits_on_its_gpus(recipe, command_line, models):
    path, hardware = DIRECTORY / f"{recipe.name}.yaml", ("--gpu", recipe.gpu, "--nodes", recipe.nodes)
    options = (*hardware, "--gpus-per-node", recipe.gpus_per_node, "--json")
    planned = command_line("plan", path, *without_hub(recipe, models), *options)
    assert planned.code == 0, planned.err
    plan = json.loads(planned.out)
    assert plan["num_gpus"] == recipe.num_gpus
    assert plan["peak"] / 1e9 == pytest.approx(float(recipe.gigabytes), abs=1)


def test_show_prints_the_file(command_line):
    shown = command_line("recipes", "show", "zephyr-7b-full")
    assert shown.out == (DIRECTORY / "zephyr-7b-full.yaml").read_text(encoding="utf-8")


def test_copy_writes_the_file_once_and_says_what_to_run(command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copied = command_line("recipes", "copy", "zephyr-7b-full")
    assert (tmp_path / "zephyr-7b-full.yaml").read_text() == (DIRECTORY / "zephyr-7b-full.yaml").read_text()
    assert "pip install 'thresher[ray]'" in copied.out
    assert "thresher plan zephyr-7b-full.yaml --gpu h100 --nodes 1 --gpus-per-node 8" in copied.out

    (tmp_path / "mine.yaml").write_text("beta: 0.2\n")
    for arguments in (["zephyr-7b-full"], ["tulu3-8b", "mine.yaml"]):
        again = command_line("recipes", "copy", *arguments)
        assert again.code == 2
        assert "exists" in again.err
    assert (tmp_path / "mine.yaml").read_text() == "beta: 0.2\n"
    nowhere = command_line("recipes", "copy", "tulu3-8b", "absent/mine.yaml")
    assert nowhere.code == 2
    assert "absent/mine.yaml" in nowhere.err


@pytest.mark.parametrize("command", ["show", "copy"])
def test_an_unknown_name_is_an_error_that_names_the_nearest(command, command_line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unknown = command_line("recipes", command, "zephir-7b-full")
    assert unknown.code == 2
    assert "did you mean zephyr-7b-full?" in unknown.err
    assert not list(tmp_path.iterdir())


def test_listing_imports_no_torch():
    code = (
        "import sys; from thresher.cli.recipes import list_recipes; list_recipes(); "
        "print([name for name in ('torch', 'transformers', 'thresher.config') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.endswith("[]\n")
