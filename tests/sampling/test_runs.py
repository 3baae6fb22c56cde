"""Samples of whole runs: the answers of policy and reference, and what they must leave unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.support.small_runs import save_small_model
from thresher.builders.export import export_checkpoint
from thresher.checkpoint.manager import list_checkpoints
from thresher.checkpoint.tensor_files import load_tensors
from thresher.config import parse_config
from thresher.models.loading.load_sharded import load_dequantized
from thresher.models.loading.quantization import Quantization
from thresher.observability.log_files import METRICS, SAMPLES
from thresher.observability.trackers.jsonl import read_metrics, read_records
from thresher.pipeline import DPOPipeline

JUDGE = """
def score(prompt, answer):
    return float(len(answer.split()))

def prefers_first(prompt, first, second):
    return 0.9
"""
GREEDY = {"num_prompts": 8, "max_new_tokens": 12, "temperature": 0.0}


def settings(base: dict[str, Any], output: Path, samples: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {**base, "output_dir": str(output), **({} if samples is None else {"samples": samples}), **more}


def run(values: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[int, dict[str, float]]]:
    """Train; return the rows of samples, and the metrics of samples by step."""
    DPOPipeline(parse_config(values)).run()
    return logged(values)


def logged(values: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[int, dict[str, float]]]:
    logs = Path(values["output_dir"]) / "logs"
    metrics = {each["step"]: each for each in read_metrics(logs / METRICS) if "samples/lengths/policy" in each}
    return read_records(logs / SAMPLES), metrics


def greedy_answer(model: PreTrainedModel, tokenizer: Any, prompt: str, max_new_tokens: int) -> list[int]:
    """The oracle: a forward over the whole text per token."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start = len(ids)
    while len(ids) - start < max_new_tokens:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return ids[start:]


def test_answers_are_those_of_the_exported_policy_and_of_the_reference(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    values = settings(base, tmp_path / "run", {**GREEDY, "judge": f"{tmp_path / 'judge.py'}:score"})
    rows, metrics = run(values)
    assert sorted({row["step"] for row in rows}) == [2, 4]
    checkpoint = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    export_checkpoint(checkpoint, tmp_path / "exported")
    paths = {"policy": tmp_path / "exported", "reference": Path(base["reference"]["model_args"]["model_name_or_path"])}
    models = {side: AutoModelForCausalLM.from_pretrained(path) for side, path in paths.items()}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    last = [row for row in rows if row["step"] == 4]
    for row in last:
        logps = {}
        for side, model in models.items():
            expected = greedy_answer(model, tokenizer, row["prompt"], 12)
            assert row[side] == tokenizer.decode(expected, skip_special_tokens=True)
            assert row[f"{side}_tokens"] == len(expected)
            assert row[f"{side}_ended"] == (expected[-1] == tokenizer.eos_token_id)
        answer = greedy_answer(models["policy"], tokenizer, row["prompt"], 12)
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        for side, model in models.items():
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            logps[side] = float(logits.log_softmax(-1)[range(len(answer)), answer].sum())
        assert row["log_ratio"] == pytest.approx(logps["policy"] - logps["reference"], abs=1e-4)
        assert row["policy_reward"] == len(row["policy"].split())
    wins = [0.5 + 0.5 * ((a := row["policy_reward"]) > (b := row["reference_reward"])) - 0.5 * (a < b) for row in last]
    assert metrics[4]["samples/win_rate"] == pytest.approx(sum(wins) / len(wins))
    assert metrics[4]["samples/win_rate_low"] < metrics[4]["samples/win_rate"] < metrics[4]["samples/win_rate_high"]
    assert "samples/kl" not in metrics[4]  # greedy answers are not drawn from the policy


def test_samples_change_no_weight_and_no_random_state(base: dict[str, Any], tmp_path: Path) -> None:
    sampled = {"num_prompts": 3, "max_new_tokens": 8}
    runs = {name: settings(base, tmp_path / name, each) for name, each in (("without", None), ("with", sampled))}
    for values in runs.values():
        DPOPipeline(parse_config(values)).run()
    for stem in ("weights", "optimizer", "rng"):
        one, other = (
            load_tensors(list_checkpoints(tmp_path / name / "checkpoints")[-1], stem) for name in ("without", "with")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_resumed_run_has_the_samples_of_an_uninterrupted_one(base: dict[str, Any], tmp_path: Path) -> None:
    samples = {"num_prompts": 3, "max_new_tokens": 8}
    whole, _ = run(settings(base, tmp_path / "whole", samples, eval_steps=1, save_steps=2))
    values = settings(base, tmp_path / "resumed", samples, eval_steps=1, save_steps=2)
    run(values)
    for checkpoint in list_checkpoints(tmp_path / "resumed" / "checkpoints")[1:]:
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    resumed, _ = run(values)
    assert resumed == whole
    assert [row["step"] for row in resumed] == [step for step in (1, 2, 3, 4) for _ in range(3)]


def test_a_policy_that_equals_its_reference_ties_at_zero_kl(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    values = settings(
        base,
        tmp_path / "run",
        {"num_prompts": 3, "max_new_tokens": 8, "judge": f"{tmp_path / 'judge.py'}:score"},
        eval_on_start=True,
        reference={},
    )
    rows, metrics = run(values)
    assert all(row["policy"] == row["reference"] for row in rows if row["step"] == 0)
    assert (metrics[0]["samples/kl"], metrics[0]["samples/win_rate"]) == (0.0, 0.5)
    assert metrics[4]["samples/kl"] != 0.0


@pytest.mark.parametrize("quantization", [None, Quantization(4)], ids=["dense", "4 bits"])
def test_the_reference_of_an_adapter_is_the_model_without_it(
    base: dict[str, Any], tmp_path: Path, quantization: Quantization | None
) -> None:
    lora = {"dtype": "fp32", "lora_rank": 4, "lora_target": ["q_proj", "v_proj"]}
    bits = None if quantization is None else {"bits": quantization.bits}
    policy = {**base["actor_train"], "model_args": {**lora, "quantization": bits}}
    rows, _ = run(settings(base, tmp_path / "run", GREEDY, actor_train=policy, reference={}, eval_on_start=True))
    model = load_dequantized(base["pretrain"], dtype=torch.float32, quantization=quantization)
    tokenizer = AutoTokenizer.from_pretrained(base["pretrain"])
    for row in rows:
        expected = tokenizer.decode(greedy_answer(model, tokenizer, row["prompt"], 12), skip_special_tokens=True)
        assert row["reference"] == expected
        assert row["step"] > 0 or row["policy"] == expected
    assert any(row["policy"] != row["reference"] for row in rows)


def test_prompts_of_a_file_need_no_validation_pairs(base: dict[str, Any], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("w5 w6 ", "w7 ", "w5 w6 ")))
    values = settings(base, tmp_path / "run", {**GREEDY, "prompts_file": str(prompts)})
    del values["validation"]
    rows, metrics = run(values)
    assert [(row["step"], row["prompt"]) for row in rows] == [(2, "w5 w6 "), (2, "w7 "), (4, "w5 w6 "), (4, "w7 ")]
    assert not any(name.startswith("eval/") for name in metrics[4])


def test_a_judge_that_fails_is_reported_and_the_run_continues(
    base: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "judge.py").write_text("def score(prompt, answer):\n    raise ValueError('no model')\n")
    judge = f"{tmp_path / 'judge.py'}:score"
    rows, metrics = run(settings(base, tmp_path / "run", {**GREEDY, "judge": judge}))
    assert "samples/win_rate" not in metrics[4]
    assert len(rows) == 6
    assert any("no win rate after step 4" in text and "ValueError: no model" in text for text in caplog.messages)


def test_answers_of_another_reference_are_not_reused(base: dict[str, Any], tmp_path: Path) -> None:
    first, _ = run(settings(base, tmp_path / "first", GREEDY))
    stored = json.loads((tmp_path / "first" / "samples" / "reference.json").read_text())
    assert len(stored["answers"]) == len({row["prompt"] for row in first})
    other = save_small_model(tmp_path / "other", seed=7)
    (tmp_path / "second" / "samples").mkdir(parents=True)
    shutil.copy(tmp_path / "first" / "samples" / "reference.json", tmp_path / "second" / "samples")
    reference = {"model_args": {"model_name_or_path": str(other)}}
    second, _ = run(settings(base, tmp_path / "second", GREEDY, reference=reference))
    assert [row["reference"] for row in first] != [row["reference"] for row in second]


def test_answers_of_other_settings_are_not_reused(base: dict[str, Any], tmp_path: Path) -> None:
    longer = GREEDY | {"max_new_tokens": 16}
    run(settings(base, tmp_path / "first", GREEDY))
    alone, _ = run(settings(base, tmp_path / "alone", longer))
    (tmp_path / "second" / "samples").mkdir(parents=True)
    shutil.copy(tmp_path / "first" / "samples" / "reference.json", tmp_path / "second" / "samples")
    second, _ = run(settings(base, tmp_path / "second", longer))
    assert [row["reference"] for row in second] == [row["reference"] for row in alone]
