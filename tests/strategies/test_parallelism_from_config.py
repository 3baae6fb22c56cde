"""A policy built from a config trains on several ranks as in one process, with and without LoRA."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support.strategies.config_runs import train_from_config
from tests.support.strategies.parity import save_model

pytestmark = pytest.mark.distributed

LORA = {"lora_rank": 4}
SOME = {"lora_rank": 4, "lora_target": ["q_proj", "o_proj", "down_proj"]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "llama", seed=0)


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


@pytest.mark.parametrize("model_args", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("axes", [{}, {"tp_size": 2}, {"cp_size": 2}, {"dp_replicate": 2}], ids=str)
def test_two_ranks(two_ranks, model_dir, axes, model_args):
    check(two_ranks, model_dir, axes, "shared", **model_args)


@pytest.mark.parametrize("axes", [{}, {"tp_size": 2}], ids=str)
def test_lora_on_some_matrices_in_padded_rows(two_ranks, model_dir, axes):
    check(two_ranks, model_dir, axes, "padded", **SOME)


@pytest.mark.parametrize("axes", [{"tp_size": 2}, {"dp_replicate": 2}, {"cp_size": 2}], ids=str)
def test_lora_on_four_ranks(four_ranks, model_dir, axes):
    check(four_ranks, model_dir, axes, "shared", **LORA)
