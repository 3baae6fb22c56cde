"""A run that is killed with SIGKILL and started again ends exactly as if it had never stopped."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.compared_runs import merge, metric_log
from tests.support.forks import python
from tests.support.real_pairs import polite_rows
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_chat_model import quickstart_rows
from thresher.builders.export import export_checkpoint

pytestmark = pytest.mark.slow

# 40 pairs in steps of 8: epochs end after steps 5 and 10; the run has 12 steps
STEPS = 12

RUNS = {
    "all weights, loss with state": {"pref_loss": "bco_pair"},
    "lora with dropout": {
        "actor_train": {"model_args": {"lora_rank": 4, "lora_dropout": 0.1}, "training_args": {"learning_rate": 0.01}}
    },
    "synced reference": {"reference": {"sync_steps": 3, "sync_alpha": 0.5}},
}
KILLS = ("step:1", "saving:2", "logged:3", "evaluated:4", "saved:4", "step:6", "saving:8", "evaluated:8", "step:11")


def write_files(directory: Path, rows: list[dict[str, str]]) -> Path:
    """40 pairs to train on and 11 to evaluate on, a number that no batch size divides."""
    for name, part in (("train", rows[:40]), ("validation", rows[40:])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return directory


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("pairs"), quickstart_rows(51))


def write_config(path: Path, model_dir: Path, files: Path, extra: dict) -> Path:
    config = {
        "pretrain": str(model_dir),
        "max_steps": STEPS,
        "logging_steps": 3,
        "eval_steps": 4,
        "save_steps": 2,
        "save_total_limit": 2,
        "sequence_length": 512,
        "track_with": [],
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "data_args": {"file_name": str(files / "train.jsonl"), "template": "raw"},
            "training_args": {
                "learning_rate": 1e-3,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "warmup_steps": 2,
            },
        },
        "validation": {"data_args": {"file_name": str(files / "validation.jsonl"), "template": "raw"}},
    }
    path.write_text(yaml.safe_dump(merge(config, extra)))
    return path


def run(config: Path, output: Path, *kills: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*python(), "-m", "tests.support.train_and_kill", str(config), str(output), *kills],
        # separate caches: compared runs must not share reference logps
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "THRESHER_CACHE_DIR": str(output / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


# CI resumes a synced reference in test_known_trainer_bugs.py
BY_HAND = ("synced reference",)


@pytest.mark.parametrize(
    "extra",
    [pytest.param(run, id=name, marks=[pytest.mark.hand] * (name in BY_HAND)) for name, run in RUNS.items()],
)
def test_a_run_killed_many_times_equals_an_uninterrupted_one_bitwise(tmp_path, tiny_dir, files, extra):
    check_a_killed_run(tmp_path, write_config(tmp_path / "run.yaml", tiny_dir, files, extra))


def labelled(row: dict[str, str], at: int) -> dict[str, Any]:
    side = "chosen" if at % 3 else "rejected"
    return {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}


def ranked(row: dict[str, str], at: int) -> dict[str, Any]:
    answers = [row["chosen"], row["rejected"], row["rejected"].upper()][: 2 + at % 2]
    return {
        "prompt": row["prompt"],
        "completions": [{"text": text, "score": -rank} for rank, text in enumerate(answers)],
    }


@pytest.mark.parametrize(
    ("loss", "to_row"),
    [
        ("kto", labelled),
        pytest.param("plackett_luce", ranked, marks=pytest.mark.hand),
        pytest.param("bradley_terry", ranked, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_of_labels_lists_or_a_reward_model_equals_an_uninterrupted_one_bitwise(
    tmp_path, tiny_dir, loss, to_row
):
    rows = [to_row(row, at) for at, row in enumerate(quickstart_rows(51))]
    config = write_config(tmp_path / "run.yaml", tiny_dir, write_files(tmp_path, rows), {"pref_loss": loss})
    check_a_killed_run(tmp_path, config)


@pytest.mark.hand  # CI has the same of a made model
@pytest.mark.real
def test_a_killed_run_of_a_real_model_equals_an_uninterrupted_one_bitwise(tmp_path, stories_dir, polite_file):
    files = write_files(tmp_path, polite_rows(polite_file, 51))
    extra = RUNS["all weights, loss with state"]
    check_a_killed_run(tmp_path, write_config(tmp_path / "run.yaml", stories_dir, files, extra))


def test_a_killed_run_of_layers_with_state_equals_an_uninterrupted_one_and_exports_bitwise(tmp_path, tiny_dir, files):
    model_dir = shutil.copytree(tiny_dir, tmp_path / "model")
    config = copy.deepcopy(STATEFUL["qwen3_5_text"])
    config.vocab_size, config.max_position_embeddings = AutoConfig.from_pretrained(tiny_dir).vocab_size, 512
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model_dir)
    extra = {"layout": "shared"}
    kills = ("saved:4", "saving:8")
    check_a_killed_run(tmp_path, write_config(tmp_path / "run.yaml", model_dir, files, extra), kills)
    checkpoint = tmp_path / "killed" / "checkpoints" / f"step-{STEPS:08d}"
    export_checkpoint(checkpoint, tmp_path / "exported")
    trained = load_file(checkpoint / "weights.safetensors")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert all(torch.equal(exported.get_parameter(name), weight) for name, weight in trained.items())
    assert any("linear_attn" in name for name in trained)


def check_a_killed_run(tmp_path: Path, config: Path, kills: Sequence[str] = KILLS) -> None:
    """Run a config without interruption and with all kills, and compare everything that both leave."""
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    first = run(config, uninterrupted)
    assert first.returncode == 0, first.stderr
    second = run(config, killed, *kills)
    assert second.returncode == 0, second.stderr
    assert "resuming from" in second.stderr

    expected = metric_log(uninterrupted)
    assert [record["step"] for record in expected] == [3, 4, 6, 8, 9, 12, 12]
    assert metric_log(killed) == expected  # loss, rewards, lr, grad_norm, counters, evaluations: bitwise
    assert expected[0]["loss"] != expected[-2]["loss"]
    last = f"checkpoints/step-{STEPS:08d}"
    for name in ("weights", "optimizer", "rng"):
        ours, theirs = (
            load_file(killed / last / f"{name}.safetensors"),
            load_file(uninterrupted / last / f"{name}.safetensors"),
        )
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert torch.equal(ours[key], tensor), f"{name}: {key}"
    assert (killed / last / "trainer.json").read_text() == (uninterrupted / last / "trainer.json").read_text()


@pytest.mark.hand  # CI has the same of a killed `precompute-reference`
def test_a_run_killed_while_scoring_its_reference_resumes_there(tmp_path, tiny_dir, files):
    """Of 7 blocks of up to 8 pairs, the first process saves 2 in a shard and loses its third; the second adds 2."""
    config = write_config(tmp_path / "run.yaml", tiny_dir, files, {"reference": {"infer_batch_size": 8}})
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    first = run(config, uninterrupted)
    assert first.returncode == 0, first.stderr
    assert "reference: 0 pairs from the cache, 51 scored" in first.stderr
    second = run(config, killed, "scoring:3", "scoring:3")
    assert second.returncode == 0, second.stderr
    assert "reference: 32 pairs from the cache, 19 scored" in second.stderr
    assert metric_log(killed) == metric_log(uninterrupted)
    last = f"checkpoints/step-{STEPS:08d}/weights.safetensors"
    assert (killed / last).read_bytes() == (uninterrupted / last).read_bytes()


def test_the_final_step_is_saved_when_epochs_end_before_max_steps(tmp_path, tiny_dir, files):
    extra = {"max_steps": 100, "num_train_epochs": 0.5, "save_steps": 50}
    assert run(write_config(tmp_path / "run.yaml", tiny_dir, files, extra), tmp_path / "out").returncode == 0
    # half of 5 steps is rounded up to 3
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000003"]
    assert metric_log(tmp_path / "out")[-1]["step"] == 3


def test_a_checkpoint_of_other_data_is_rejected(tmp_path, tiny_dir, files):
    config = write_config(tmp_path / "run.yaml", tiny_dir, files, {"max_steps": 2})
    assert run(config, tmp_path / "out").returncode == 0
    other = {"max_steps": 4, "actor_train": {"data_args": {"file_name": str(files / "validation.jsonl")}}}
    refused = run(write_config(tmp_path / "other.yaml", tiny_dir, files, other), tmp_path / "out")
    assert refused.returncode != 0
    assert "belongs to another run: its data is" in refused.stderr
