"""Before training, the model is checked on real pairs, and its layout is one that it supports."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DogeConfig, NemotronConfig, Phi3Config, PreTrainedConfig

from tests.support.compared_runs import metric_log
from tests.support.logged import logged
from tests.support.small_runs import save_small_model, write_rows
from tests.support.tiny_llama import VOCAB
from tests.support.tiny_run import PairsInMemory
from thresher.builders.data import probe_examples
from thresher.config import parse_config
from thresher.data.example import Example
from thresher.errors import UserError
from thresher.pipeline import DPOPipeline

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# does not pass the segments to its attention
NEMOTRON = NemotronConfig(**SHAPE)
# scores of a token depend on its value
DOGE = DogeConfig(**SHAPE, keep_window_size=64)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 12,
}
PHI3 = Phi3Config(**SHAPE, original_max_position_embeddings=12, rope_parameters=LONGROPE)


@pytest.fixture
def run(tmp_path):
    """Train a step with a model of random weights; return the messages."""

    def train(config: PreTrainedConfig, **settings) -> list[str]:
        directory = save_small_model(tmp_path / "model", 0)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3)
        model.save_pretrained(directory)
        data = {"template": "raw", "file_name": str(write_rows(tmp_path / "train.jsonl", 12, 0))}
        values = {
            "pretrain": str(directory),
            "output_dir": str(tmp_path / "out"),
            "max_steps": 1,
            "save_steps": 0,
            "sequence_length": 64,
            "track_with": [],
            "actor_train": {"model_args": {"dtype": "fp32"}, "data_args": data},
            "reference": {"cache_dir": str(tmp_path / "cache")},
        }
        with logged() as records:
            DPOPipeline(parse_config({**values, **settings})).run()
        return [record.getMessage() for record in records]

    return train


@pytest.mark.parametrize("mode", ["precompute", "concurrent"])
@pytest.mark.parametrize("config", [NEMOTRON, DOGE], ids=lambda config: config.model_type)
def test_auto_falls_back_to_padded_with_one_line_if_packed_rows_fail(run, tmp_path, config, mode):
    reference = {"mode": mode, **({"cache_dir": str(tmp_path / "cache")} if mode == "precompute" else {})}
    lines = run(config, reference=reference)
    assert len([line for line in lines if line.startswith("using layout padded: ")]) == 1
    assert any(line.split() == ["layout", "padded"] for line in lines)
    assert metric_log(tmp_path / "out")[0]["loss"] == pytest.approx(0.693147, abs=1e-5)


def test_a_layout_that_the_config_names_is_not_replaced(run):
    with pytest.raises(
        UserError,
        match=r"layout `shared` does not work with model family `nemotron`.*use layout=padded$",
    ):
        run(NEMOTRON, layout="shared")


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_pairs_beyond_the_short_context_of_longrope_are_rejected_with_a_length_that_works(run, layout):
    with pytest.raises(UserError, match=r"longrope of the model family phi3 rotates.*; set sequence_length=12$"):
        run(PHI3, layout=layout)
    assert run(PHI3, layout=layout, sequence_length=12, resume_from_checkpoint=False)


def test_the_model_is_checked_on_the_shortest_and_the_longest_sequence():
    def pair(*lengths: int) -> Example:
        return Example.pair(*(np.full(length, length, dtype=np.int32) for length in lengths))

    # the last one has the most tokens in total, the third the longest sequence
    pairs = [pair(3, 5, 5), pair(2, 1, 1), pair(2, 1, 20), pair(1, 15, 15)]
    assert probe_examples(PairsInMemory(pairs)).pair_ids.tolist() == [1, 2]
