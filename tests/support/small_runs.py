"""Inputs for small runs of the full pipeline: random tiny models, a tokenizer and pairs of random words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.compared_runs import metric_log
from tests.support.tiny_llama import VOCAB, save_tiny_llama
from thresher.builders.inputs import RunInputs
from thresher.builders.objective import build_objective
from thresher.builders.reference_mode import reference_mode
from thresher.checkpoint.tensor_files import ShardedReader
from thresher.config import DPOConfig, parse_config
from thresher.observability.log_files import EVAL_PAIRS
from thresher.observability.trackers.jsonl import read_records


def save_small_model(directory: Path, seed: int) -> Path:
    """Write a tiny Llama and a tokenizer whose words are w4 to w63."""
    save_tiny_llama(directory, seed)
    return save_small_tokenizer(directory)


def save_small_tokenizer(directory: Path) -> Path:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(directory)
    return directory


def write_rows(path: Path, count: int, seed: int, longest: tuple[int, int] = (4, 9)) -> Path:
    """Write pairs of random words; longest: most words of a prompt and of a response."""
    draw = np.random.default_rng(seed)

    def words(max_count: int) -> str:
        return " ".join(f"w{i}" for i in draw.integers(4, VOCAB, draw.integers(1, max_count + 1)))

    prompt, response = longest
    rows = [
        {"prompt": words(prompt) + " ", "chosen": words(response), "rejected": words(response)} for _ in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_base(directory: Path) -> dict[str, Any]:
    """Return a config of 4 steps over 21 pairs and 3 validation pairs; the last step has 3 pairs, fewer than 4 ranks.

    Policy and reference are different models, so that margins are not rounding noise around 0.
    """
    policy, reference = (save_small_model(directory / name, seed) for seed, name in enumerate(("policy", "reference")))
    data = {"template": "raw"}
    return {
        "pretrain": str(policy),
        "max_steps": 4,
        "save_steps": 2,
        "eval_steps": 2,
        "sequence_length": 64,
        "track_with": [],
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": str(write_rows(directory / "train.jsonl", 21, 0)), **data},
            "training_args": {
                "learning_rate": 0.01,
                "global_batch_size": 6,
                "per_device_train_batch_size": 2,
                "lr_scheduler_type": "linear",
                "adam_epsilon": 1e-3,  # the default would amplify rounding noise
            },
        },
        "reference": {"model_args": {"model_name_or_path": str(reference)}, "infer_batch_size": 4},
        "validation": {"data_args": {"file_name": str(write_rows(directory / "validation.jsonl", 3, 1)), **data}},
    }


def open_small_inputs(values: Mapping[str, Any]) -> tuple[DPOConfig, RunInputs]:
    config = parse_config(values)
    inputs = RunInputs(config)
    inputs.open()
    return config, inputs


def mode_of(config: DPOConfig) -> str:
    return reference_mode(config, build_objective(config))


def last_weights(output: Path) -> dict[str, torch.Tensor]:
    return stored(max((output / "checkpoints").iterdir()), "weights")


def assert_same_weights(one: Path, other: Path) -> None:
    """Check that the final weights of two runs are equal, bitwise."""
    weights, others = last_weights(one), last_weights(other)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def stored(checkpoint: Path, stem: str) -> dict[str, torch.Tensor]:
    """Read the full tensors of a checkpoint, however many processes wrote them."""
    with ShardedReader(checkpoint, stem) as tensors:
        return {name: tensors.read(name) for name in tensors}


def assert_same_run(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    """Check that every logged metric, the values of single pairs and every final weight agree."""
    ours, theirs = metric_log(one), metric_log(other)
    assert [record.keys() for record in ours] == [record.keys() for record in theirs]
    for mine, yours in zip(ours, theirs, strict=True):
        differ = {
            key: (each, yours[key])
            for key, each in mine.items()
            if each != pytest.approx(yours[key], rel=tolerance, abs=tolerance)
        }
        assert not differ, differ
    pairs, other_pairs = _evaluated_pairs(one), _evaluated_pairs(other)
    assert [each.keys() for each in pairs] == [each.keys() for each in other_pairs] != []
    for mine, yours in zip(pairs, other_pairs, strict=True):
        assert mine.pop("sets", None) == yours.pop("sets", None)
        assert mine == {name: pytest.approx(value, rel=tolerance, abs=tolerance) for name, value in yours.items()}
    weights, others = last_weights(one), last_weights(other)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], atol=tolerance, rtol=0, msg=name)


def _evaluated_pairs(output: Path) -> list[dict[str, Any]]:
    return read_records(output / "logs" / EVAL_PAIRS)
