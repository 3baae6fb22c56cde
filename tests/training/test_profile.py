"""Profiles of single steps: they contain the step, and change neither its numbers nor other steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compared_runs import NOT_REPEATABLE
from tests.support.tiny_llama import save_tiny_llama
from tests.support.tiny_run import build_run, noise_pairs
from thresher.errors import UserError


def train(directory: Path, model: Path, **changes: Any) -> tuple[list[Any], dict[str, torch.Tensor], list[bool]]:
    """Train four steps of LoRA with dropout; return the logged numbers, the weights and which steps were profiled."""
    training = {"global_batch_size": 4, "per_device_train_batch_size": 2}
    values = {
        "pretrain": str(model),
        "output_dir": str(directory),
        "max_steps": 4,
        "actor_train": {
            "training_args": training,
            "model_args": {"dtype": "fp32", "lora_rank": 2, "lora_dropout": 0.5},
        },
    }
    trainer = build_run(values | changes, noise_pairs(16)).trainer
    profiled, step = [], trainer.training_step

    def training_step() -> Any:
        profiled.append(torch.autograd._profiler_enabled())
        return step()

    trainer.training_step = training_step
    records = [{k: v for k, v in each.items() if not k.startswith(NOT_REPEATABLE)} for _, each in trainer.run(4)]
    return records, trainer.engine.weights(), profiled


def test_a_profile_contains_its_step_and_changes_no_number(tmp_path):
    model = save_tiny_llama(tmp_path / "model", 0)
    plain, weights, _ = train(tmp_path / "plain", model)
    found, weights_with, profiled = train(tmp_path / "profiled", model, profile={"steps": [2, 4]})
    assert found == plain
    assert all(torch.equal(weights[name], weight) for name, weight in weights_with.items())
    assert profiled == [False, True, False, True]
    folder = tmp_path / "profiled" / "logs" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [f"rank-0-step-{n}.trace.json.gz" for n in (2, 4)]
    events = json.loads(gzip.decompress((folder / "rank-0-step-2.trace.json.gz").read_bytes()))["traceEvents"]
    [step] = [each for each in events if each["name"].startswith("step ")]
    assert step["name"] == "step 2"
    inside = {each["name"] for each in events if step["ts"] <= each["ts"] <= step["ts"] + step.get("dur", 0)}
    assert {"aten::mm", "aten::embedding", "autograd::engine::evaluate_function: MmBackward0"} <= inside
    allocated = [each["args"] for each in events if each["name"] == "[memory]"]
    assert max(each["Bytes"] for each in allocated) > 0


def test_a_step_that_the_run_does_not_have_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"^profile\.steps has step 5, and the run has 4; name earlier steps$"):
        train(tmp_path, save_tiny_llama(tmp_path / "model", 0), profile={"steps": [1, 5]})


def test_a_full_disk_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "profile").write_text("a file")
    records, _, _ = train(tmp_path, save_tiny_llama(tmp_path / "model", 0), profile={"steps": [2]})
    assert len(records) == 4
    assert "could not write" in caplog.text
