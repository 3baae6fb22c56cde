"""Every example, and every YAML block of README.md and docs/ that is not another trainer's, has a plan.

Or it has an engine that plan does not know.

A block of a page without a model is a change of the quickstart's config. Models and adapters that a config names
and that are not in the checkout are replaced by a small Llama of four layers and an adapter of it; data files that are
not there stay, and plan assumes their pairs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.compared_runs import merge
from tests.support.engines.adapters import save_adapter
from tests.support.engines.parity import save_model
from tests.support.paths import ROOT
from tests.support.small_runs import save_small_tokenizer
from thresher.importers.convert import DIALECTS
from thresher.importers.read import recognize

# of Ray and Kubernetes
NO_CONFIGS = {
    "examples/kuberay/rayjob.yaml",
    "examples/ray_cluster/cluster.yaml",
    "examples/skypilot/train.yaml",
}
QUICKSTART = "examples/quickstart/config.yaml"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
_BLOCK = re.compile(r"^```ya?ml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> dict[str, dict[str, Any]]:
    files = [path for ending in ("*.yaml", "*.yml") for path in sorted((ROOT / "examples").rglob(ending))]
    found = {str(path.relative_to(ROOT)): path for path in files}
    return {name: yaml.safe_load(path.read_text()) for name, path in found.items() if name not in NO_CONFIGS}


def blocks() -> dict[str, dict[str, Any]]:
    found = {}
    for page in PAGES:
        for number, text in enumerate(_BLOCK.findall(page.read_text(encoding="utf-8")), start=1):
            trainer = recognize(values := yaml.safe_load(text), DIALECTS)
            if trainer is None or trainer.name == "roll":
                found[f"{page.relative_to(ROOT)}-{number}"] = values
    return found


RECIPES = examples() | blocks()


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """A model and an adapter."""
    root = tmp_path_factory.mktemp("parts")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=1024)).save_pretrained(root / "model")
    save_small_tokenizer(root / "model")
    save_small_tokenizer(save_model(root / "experts", "qwen3_moe", 0, num_experts=16))
    save_adapter(root / "adapter", root / "model")
    return root


def write_modules(page: Path, directory: Path) -> dict[str, Path]:
    """Write the Python blocks of a page that name their file in the first line; return their paths by name."""
    found = re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    for name, text in found:
        (directory / name).write_text(text)
    return {name: directory / name for name, _ in found}


def runnable(recipe: dict[str, Any], parts: Path, directory: Path) -> dict[str, Any]:
    """Complete a recipe, and replace the models that are not here."""
    base = {"actor_train": {"data_args": {}}} if "pretrain" in recipe else dict(RECIPES[QUICKSTART])
    if "validation" in recipe:
        base.pop("validation", None)  # pairs of files, or a share of the training pairs
    values = merge(base, recipe)
    if not (ROOT / str(values.get("pretrain", "absent"))).exists():
        values["pretrain"] = str(parts / ("experts" if "ep_size" in str(values) else "model"))
    if "adapter_name_or_path" in values["actor_train"].get("model_args", {}):
        values["actor_train"]["model_args"]["adapter_name_or_path"] = str(parts / "adapter")
    values["actor_train"]["data_args"].setdefault("template", "raw")  # the small tokenizer has no chat template
    return {**values, "output_dir": str(directory / "run")}


def is_native(recipe: dict[str, Any]) -> bool:
    strategy = recipe.get("actor_train", {}).get("strategy_args") or {}
    return strategy.get("strategy_name", "fsdp2_train") == "fsdp2_train"


def test_the_examples_and_pages_have_recipes():
    assert sum(map(is_native, examples().values())) >= 2
    assert len(blocks()) >= 18


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_a_plan(name, command_line, parts, tmp_path, monkeypatch):
    text = yaml.safe_dump(runnable(RECIPES[name], parts, tmp_path))
    page = ROOT / name.rpartition("-")[0]
    for module, path in write_modules(page, tmp_path).items() if page.is_file() else ():
        text = text.replace(f"{module}:", f"{path}:")
    (tmp_path / "recipe.yaml").write_text(text)
    monkeypatch.chdir(ROOT)

    result = command_line("plan", tmp_path / "recipe.yaml", "--json")

    assert result.code in (0, 2), result.err
    if not is_native(RECIPES[name]):
        assert "plan estimates fsdp2_train" in result.err
        return
    plan = json.loads(result.out)  # an error has no report
    assert plan["fits"] == (result.code == 0)
    assert plan["num_steps"] >= 1
    assert plan["parameters"]["total"] > 0
    assert not (tmp_path / "run").exists()
