"""Every recipe trains, with its model and its data replaced by tiny ones."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from tests.support.compared_runs import metric_log
from tests.support.published_models import config_of
from tests.support.recipes import ARCHITECTURES, ROWS, model_name, split_of
from tests.support.small_tokenizer import CHAT_TEMPLATE, make_tokenizer
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import FAMILIES, GROUPED
from thresher.builders.objective import build_objective
from thresher.config import load_config
from thresher.pipeline import DPOPipeline
from thresher.recipes.catalog import Recipe, all_recipes

NUM_ROWS = 24
REPLACED = {
    *("pretrain", "tokenizer_name_or_path", "file_name", "global_batch_size", "max_steps", "output_dir"),
    *("device_mapping", "strategy_args"),
}


def tiny_config(name: str, vocab: int) -> PreTrainedConfig:
    """A config of the family of a published model."""
    family = config_of(ARCHITECTURES[name]).model_type
    known = {**FAMILIES, **STATEFUL}.get(family)
    config = copy.deepcopy(known) if known is not None else AutoConfig.for_model(family, **GROUPED)
    config.vocab_size, config.max_position_embeddings = vocab, 65536
    return config


def save_tiny_model(name: str, directory: Path) -> str:
    tokenizer = make_tokenizer(pad_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(name, len(tokenizer))).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def tiny_run(recipe: Recipe, directory: Path) -> dict[str, Any]:
    """The values of a recipe with these replaced, and nothing else.

    - `pretrain` and `tokenizer_name_or_path`: a tiny model of the same family, with a small tokenizer;
    - each file name: a file with a few rows that have the columns of the published dataset;
    - `global_batch_size`: 8, and `max_steps`: 2;
    - `output_dir`;
    - `device_mapping` and `strategy_args`: removed, so one process trains on a CPU.
    """
    values = copy.deepcopy(recipe.values)
    values["pretrain"] = save_tiny_model(model_name(recipe), directory / "model")
    model_args = values["actor_train"].get("model_args", {})
    if "tokenizer_name_or_path" in model_args:
        model_args["tokenizer_name_or_path"] = values["pretrain"]
    for number, section in enumerate(_with_files(values)):
        section["file_name"] = write_rows(directory / f"{number}.jsonl", split_of(section["file_name"]).columns, number)
    values |= {"max_steps": 2, "output_dir": str(directory / "run")}
    values["actor_train"]["training_args"]["global_batch_size"] = 8
    for role in ("actor_train", "reference"):
        for key in ("device_mapping", "strategy_args"):
            values.get(role, {}).pop(key, None)
    return values


def _with_files(section: Any) -> Iterator[dict[str, Any]]:
    """Find every section that names files."""
    if isinstance(section, dict):
        if "file_name" in section:
            yield section
        for each in section.values():
            yield from _with_files(each)


def write_rows(path: Path, columns: str, seed: int) -> str:
    rows = [
        ROWS[columns](f"Why is {'very ' * (row % 2)}{seed * NUM_ROWS + row} good?", f"Because of {row}.", "no, bad")
        for row in range(NUM_ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def flat(values: Any, name: str = "") -> dict[str, str]:
    """Values as text by their dotted key."""
    if not isinstance(values, dict):
        return {name: str(values)}
    return {key: each for part, inner in values.items() for key, each in flat(inner, f"{name}.{part}").items()}


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_trains_with_a_tiny_model_and_tiny_data(recipe, tmp_path):
    values = tiny_run(recipe, tmp_path)
    changed = {key for key, _ in flat(recipe.values).items() ^ flat(values).items()}
    assert not [key for key in changed if not REPLACED.intersection(key.split("."))]

    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    config = load_config(tmp_path / "recipe.yaml")
    DPOPipeline(config).run()

    log = metric_log(tmp_path / "run")
    trained = [record for record in log if "loss" in record]
    assert trained[-1]["step"] == 2
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in trained)
    assert any("eval/loss" in record for record in log) == (config.validation is not None)
    if (start := build_objective(config).zero_margin_loss) is not None:  # the policy is still close to the reference
        assert trained[0]["loss"] == pytest.approx(start, abs=0.01)
