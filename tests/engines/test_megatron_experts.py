"""Stacked experts of a Megatron-Core layer equal one expert after another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core", reason="megatron-core is not installed; install thresher[megatron]")
from thresher.engines.megatron.layers import StackedExperts

HIDDEN, FFN, COUNT = 32, 16, 3


def make_experts(dtype: torch.dtype, *, ep: int = 1, tp: int = 1) -> StackedExperts:
    sizes = {"expert_model_parallel_size": ep, "tensor_model_parallel_size": tp}
    config = SimpleNamespace(moe_ffn_hidden_size=FFN, hidden_size=HIDDEN, params_dtype=dtype, **sizes)
    torch.manual_seed(0)
    experts = StackedExperts(COUNT, config)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return experts


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 4, 0), (2, 2, 2)])
def test_outputs_and_gradients_equal_a_loop(counts, dtype, tolerance):
    experts = make_experts(dtype)
    rows = torch.randn(sum(counts), HIDDEN, dtype=dtype, requires_grad=True)
    probs = torch.rand(sum(counts), requires_grad=True)
    weights = torch.randn(sum(counts), HIDDEN)
    leaves = [rows, probs, experts.gate_up_proj, experts.down_proj]

    found, _ = experts(rows, torch.tensor(counts), probs)
    found_gradients = torch.autograd.grad((found * weights).sum(), leaves)

    outputs = []
    for expert, (some, scale) in enumerate(zip(rows.split(counts), probs.split(counts), strict=True)):
        gate, up = (some @ experts.gate_up_proj[expert].T).chunk(2, dim=-1)
        outputs.append(((F.silu(gate) * up * scale[:, None]).to(dtype)) @ experts.down_proj[expert].T)
    expected = torch.cat(outputs)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), leaves)

    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_experts_without_tokens_have_a_gradient_of_zero():
    """A rank whose experts get no token still takes part in the reduction of gradients."""
    experts = make_experts(torch.float32)
    rows = torch.zeros(0, HIDDEN, requires_grad=True)
    out, _ = experts(rows, torch.zeros(COUNT, dtype=torch.int64), torch.zeros(0))
    assert out.shape == (0, HIDDEN)
    out.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in experts.parameters())


@pytest.mark.parametrize(("ep", "tp", "is_replicated"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_experts_are_reduced_over_the_ranks_that_have_the_same(ep, tp, is_replicated):
    experts = make_experts(torch.float32, ep=ep, tp=tp)
    assert {weight.allreduce for weight in experts.parameters()} == {is_replicated}
