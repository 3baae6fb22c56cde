"""A policy built from a config trains on several ranks as in one process, with and without LoRA."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.config_runs import start_against_one_process, train_from_config
from tests.support.engines.parity import save_model

pytestmark = pytest.mark.distributed

LORA = {"lora_rank": 4}
SOME = {"lora_rank": 4, "lora_target": ["q_proj", "o_proj", "down_proj"]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "llama", seed=0)


@pytest.fixture
def model_with_trained_vectors(request, tmp_path):
    """A model of a family whose norms and biases are not representable in bf16; new norms are all 1."""
    directory = save_model(tmp_path / "model", request.param, seed=0)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if weight.ndim == 1:
            weights[name] = weight + 0.1 * torch.randn(weight.shape, generator=generator)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def check(pool, model_dir, axes, layout, tolerance=1e-5, **model_args):
    one = train_from_config(model_dir, {}, layout, **model_args)
    for rank in pool.run(partial(train_from_config, model_dir, axes, layout, **model_args)):
        assert rank.grad_norms == pytest.approx(one.grad_norms, abs=tolerance)
        for ours, theirs in zip(rank.metrics, one.metrics, strict=True):
            assert ours == pytest.approx(theirs, abs=tolerance, rel=tolerance)
        assert rank.weights.keys() == one.weights.keys()
        for name, weight in one.weights.items():
            torch.testing.assert_close(rank.weights[name], weight, atol=2e-5, rtol=0, msg=name)
    assert one.metrics[0]["loss"] == pytest.approx(0.693147, abs=1e-5)  # policy and reference are one model
    assert abs(one.metrics[2]["loss"] - one.metrics[0]["loss"]) > 1e-3  # and the policy moved


@pytest.mark.covered
@pytest.mark.parametrize("model_args", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("axes", [{}, {"tp_size": 2}, {"cp_size": 2}, {"dp_replicate": 2}, {"zero_stage": 2}], ids=str)
def test_two_ranks(two_ranks, model_dir, axes, model_args):
    check(two_ranks, model_dir, axes, "shared", **model_args)


@pytest.fixture(scope="module")
def experts_dir(tmp_path_factory):
    """As the hub stores a mixture of experts: one by one; the model has them in one matrix."""
    return save_model(tmp_path_factory.mktemp("experts"), "qwen3_moe", seed=0)


@pytest.mark.parametrize(
    "model_args", [{}, {"lora_rank": 4, "lora_target": ["q_proj", "o_proj"]}], ids=["full", "lora"]
)
def test_a_mixture_of_experts_is_sharded(two_ranks, experts_dir, model_args):
    check(two_ranks, experts_dir, {}, "shared", **model_args)


@pytest.mark.parametrize("axes", [{}, {"tp_size": 2}], ids=str)
def test_lora_on_some_matrices_in_padded_rows(two_ranks, model_dir, axes):
    check(two_ranks, model_dir, axes, "padded", **SOME)


@pytest.mark.parametrize("axes", [{"tp_size": 2}, {"dp_replicate": 2}, {"cp_size": 2}], ids=str)
def test_lora_on_four_ranks(four_ranks, model_dir, axes):
    check(four_ranks, model_dir, axes, "shared", **LORA)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("model_with_trained_vectors", ["llama", "qwen2", "qwen3"], indirect=True)
@pytest.mark.parametrize("axes", [{}, {"dp_replicate": 2}], ids=str)
def test_a_policy_on_two_ranks_starts_at_margin_0_from_a_reference_of_one_process(
    two_ranks, model_with_trained_vectors, axes, dtype
):
    for distance, metrics in two_ranks.run(start_against_one_process, model_with_trained_vectors, axes, dtype):
        assert distance <= 1e-6
        assert metrics["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
