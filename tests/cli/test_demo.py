"""`thresher demo`: the config that it writes, and its errors; scripts/first-hour runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from thresher.config import load_config
from thresher.demo import copy_pairs, write_config


@pytest.mark.parametrize("directory", ["demo", "a demo: with 'odd', {name} #1", "output/quickstart/run"])
@pytest.mark.parametrize("model", [None, "path/to/model"])
def test_the_config_is_the_quickstarts_with_the_files_of_the_demo(tmp_path, directory, model):
    output = tmp_path / directory
    output.mkdir(parents=True)
    train = copy_pairs(output)
    config = load_config(write_config(output, model=model, data=[]), [])
    assert config.pretrain == (model or str(output / "model"))
    assert config.output_dir == str(output / "run")
    assert config.actor_train.data_args.file_name == [str(train)]
    assert config.validation is not None
    assert config.validation.data_args.file_name == [str(output / "validation.jsonl")]
    assert config.actor_train.model_args.dtype == ("bf16" if model else "fp32")
    assert config.actor_train.training_args.learning_rate == (1e-6 if model else 2e-4)
    assert config.max_steps == (40 if model else None)


def test_given_data_hold_out_a_tenth_for_validation(tmp_path):
    config = load_config(write_config(tmp_path, model="m", data=["a.jsonl", "b.jsonl"]), [])
    assert config.actor_train.data_args.file_name == ["a.jsonl", "b.jsonl"]
    assert config.validation is not None
    assert config.validation.split == 0.1
    assert config.sequence_length == 512


def test_an_existing_directory_is_left_alone(command_line):
    Path("taken").mkdir()
    Path("taken/dpo_config.yaml").write_text("mine")
    result = command_line("demo", "--output", "taken")
    assert (result.code, result.out) == (2, "")
    assert "taken exists; choose a different --output, or remove it" in result.err
    assert "thresher train taken/dpo_config.yaml" in result.err
    assert [path.name for path in Path("taken").iterdir()] == ["dpo_config.yaml"]


def test_a_missing_model_is_a_user_error(command_line):
    result = command_line("demo", "--model", "nowhere/model", "--data", "nowhere.jsonl", "--output", "out")
    assert result.code == 2
    assert "nowhere" in result.err
