"""Transformers -> Megatron-Core -> transformers is bitwise, and a rank reads only its slices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.engines import megatron_models
from tests.support.engines.fake_world import shapes_in_a_fake_world
from tests.support.engines.parity import save_model
from thresher.engines.megatron.declaration import MegatronSizes
from thresher.models.loading.load import load_model

pytest.importorskip("megatron.core", reason="megatron-core is not installed; install thresher[megatron]")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ENGINE = "megatron"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Callable[..., Path]:
    @cache
    def save(family: str, **changes: object) -> Path:
        return save_model(tmp_path_factory.mktemp(family), family, seed=0, **changes)

    return save


def check_round_trip(pool, path: Path, sizes: MegatronSizes) -> None:
    by_rank = pool.run(megatron_models.weights, path, sizes)
    found = megatron_models.assemble([pieces for pieces, *_ in by_rank])
    expected = dict(load_model(str(path)).named_parameters())
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    for pieces, num_read, num_parameters in by_rank:
        assert num_read == sum(piece.values.numel() for piece in pieces) <= num_parameters


@pytest.mark.covered
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_round_trip_on_two_ranks(family, tp, pp, tied, two_ranks, model_dir):
    sizes = MegatronSizes(tp=tp, pp=pp, sequence_parallel=True)
    check_round_trip(two_ranks, model_dir(family, tie_word_embeddings=tied), sizes)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen2", MegatronSizes(tp=2, pp=2)),
        ("llama", MegatronSizes(tp=2, pp=2)),
        ("qwen3", MegatronSizes(tp=4)),
        ("qwen3_moe", MegatronSizes(pp=2, ep=2)),
        ("qwen3_moe", MegatronSizes(tp=2, pp=2, ep=2, sequence_parallel=True)),
    ],
    ids=str,
)
def test_round_trip_on_four_ranks(family, sizes, four_ranks, model_dir):
    check_round_trip(four_ranks, model_dir(family), sizes)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen2", MegatronSizes(pp=2, virtual_pp=2)), ("qwen3_moe", MegatronSizes(ep=2))],
    ids=["virtual_stages", "experts"],
)
def test_round_trip_of_virtual_stages_and_experts(family, sizes, two_ranks, model_dir):
    check_round_trip(two_ranks, model_dir(family), sizes)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_round_trip_of_a_padded_vocabulary(tied, two_ranks, model_dir):
    check_round_trip(two_ranks, model_dir("llama", tie_word_embeddings=tied, vocab_size=97), MegatronSizes(tp=2))


def test_the_ranks_of_a_large_model_cover_every_tensor_once():
    """The shape of Qwen3-30B-A3B with four layers, on TP 2 x PP 2 x EP 8: 16 processes, on the meta device."""
    sizes = MegatronSizes(tp=2, pp=2, ep=8, sequence_parallel=True)
    config = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    covered, expected = shapes_in_a_fake_world("qwen3_moe", config, sizes, num_processes=16)
    assert covered == expected
