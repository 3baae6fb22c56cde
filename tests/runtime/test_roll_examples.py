"""ROLL's two published DPO configs train on Megatron-Core, with only model, data and devices replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer, Qwen3MoeConfig

from tests.support.compared_runs import merge, metric_log
from tests.support.paths import shared_path
from tests.support.small_runs import write_rows
from thresher import DPOPipeline, load_config
from thresher.checkpoint.manager import list_checkpoints

pytestmark = [pytest.mark.distributed, pytest.mark.real]
pytest.importorskip("megatron.core", reason="needs the extra megatron")

VOCAB = 272
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(directory: Path, config: Qwen2Config | Qwen3MoeConfig) -> str:
    """Random weights, and a tokenizer of bytes with Qwen's markers of turns."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=markers, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([], trainer)
    tokenizer = Qwen2Tokenizer(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def write_config(name: str, directory: Path, model: Qwen2Config | Qwen3MoeConfig, workers: int) -> Path:
    """The published config with another model, data and devices, and with its event files below the directory."""
    given: dict[str, Any] = yaml.safe_load(shared_path("peer-configs", "roll", name).read_text())
    write_rows(directory / "pairs.jsonl", 128, seed=0)
    data = {"data_args": {"file_name": str(directory / "pairs.jsonl")}}
    replaced = {
        "pretrain": write_model(directory / "model", model),
        "num_gpus_per_node": None,
        "tracker_kwargs": {"log_dir": str(directory / "events")},
        "validation": data,
        "actor_train": {**data, "device_mapping": None, "num_workers": workers},
        "reference": {"device_mapping": None, "num_workers": workers},
    }
    path = directory / name
    path.write_text(yaml.safe_dump(merge(given, replaced)))
    return path


def train(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Run a config in its directory; return its log."""
    monkeypatch.chdir(path.parent)
    config = load_config(path)
    DPOPipeline(config).run()
    output = Path(config.output_dir)
    assert [checkpoint.name for checkpoint in list_checkpoints(output / "checkpoints")]
    return metric_log(output)


def losses(log: list[dict[str, float]]) -> list[float]:
    return [record["loss"] for record in log if "loss" in record]


@pytest.mark.hand  # CI has its config in tests/config and Megatron-Core in tests/engines
def test_the_dense_example_trains_to_the_end(ray_for_megatron, tmp_path, monkeypatch):
    log = train(write_config("qwen2.5-3B_dpo_megatron.yaml", tmp_path, Qwen2Config(**SHAPE), 2), monkeypatch)
    values = losses(log)
    assert len(values) == 40  # 10 epochs of 128 pairs, 32 pairs per step; max_steps is 500
    assert values[0] == pytest.approx(0.6931, abs=1e-3)
    assert values[-1] < values[0]


@pytest.mark.hand  # 32 processes; CI trains a model with experts in tests/engines
def test_the_example_with_experts_trains_to_the_end(ray_for_megatron, tmp_path, monkeypatch):
    """Two stages, eight workers for the experts of each, for the policy and again for the reference."""
    model = Qwen3MoeConfig(**SHAPE, **EXPERTS)
    log = train(write_config("qwen3-30BA3B-dpo_megatron_80GB.yaml", tmp_path, model, 16), monkeypatch)
    values = losses(log)
    assert len(values) == 10  # 10 epochs of 128 pairs, all of them in a step
    assert values[0] == pytest.approx(0.6931, abs=1e-3)
