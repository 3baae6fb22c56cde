"""Logps computed one vocabulary slice at a time: values, gradients, precision, memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.tiny_models import pair_of
from thresher.data.example import ExampleBatch
from thresher.models import lm_head as head_module
from thresher.models.layouts import PackedLayout
from thresher.models.lm_head import (
    LMHead,
    LogitTransform,
    log_sum_squared_probs,
    target_logps_and_entropy,
)
from thresher.models.logps import PairModel

TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.3), LogitTransform(softcap=2.0), LogitTransform(0.7, 1.5)]


@pytest.fixture(params=[10**9, 64, 1], ids=["one slice", "slices", "one column per slice"])
def at_once(request, monkeypatch):
    monkeypatch.setattr(head_module, "LOGITS_AT_ONCE", request.param)


def target_logps(head: LMHead, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return target_logps_and_entropy(head, rows, targets, with_entropy=False)[0]


def _case(num_rows: int, hidden: int, vocab: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(num_rows, hidden, generator=generator, dtype=dtype)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=dtype)
    bias = torch.randn(vocab, generator=generator, dtype=dtype)
    return rows, weight, bias, torch.randint(0, vocab, (num_rows,), generator=generator)


def _reference_logps(rows, weight, bias, targets, transform):
    logits = rows @ weight.T if bias is None else rows @ weight.T + bias
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("vocab", [100, 1000, 49_152, 128_256, 151_936])
def test_slices_of_the_vocabulary_are_whole_tiles_of_a_product(vocab, on_gpu):
    at_once = head_module.LOGITS_AT_ONCE_ON_GPU if on_gpu else head_module.LOGITS_AT_ONCE
    for num_rows in (1, 7, 184, 500, 3_333, 16_384):
        width = head_module.slice_width(vocab, num_rows, on_gpu=on_gpu)
        assert width == vocab or width < 128 or width % 128 == 0
        assert num_rows * width <= at_once + num_rows * 128
        assert width == vocab or num_rows * (width + 128) > at_once / 2  # no more slices than needed


def test_a_batch_without_scored_tokens_has_no_logps_and_a_gradient_of_zero():
    rows, weight, _, targets = _case(0, 5, 33, torch.float64)
    weight.requires_grad_()
    head = LMHead(weight, None, torch.float64, LogitTransform())
    logps = target_logps(head, rows, targets)
    assert logps.shape == log_sum_squared_probs(head, rows).shape == (0,)
    logps.sum().backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_values_and_gradients_equal_those_of_full_logits(transform, has_bias, at_once):
    rows, weight, bias, targets = _case(7, 5, 33, torch.float64)
    factors = torch.linspace(-2, 1.5, 7, dtype=torch.float64)
    found = []
    for method in ("slices", "full"):
        leaves = [tensor.clone().requires_grad_() for tensor in (rows, weight, bias)]
        leaf_bias = leaves[2] if has_bias else None
        if method == "slices":
            logps = target_logps(LMHead(leaves[1], leaf_bias, torch.float64, transform), leaves[0], targets)
        else:
            logps = _reference_logps(leaves[0], leaves[1], leaf_bias, targets, transform)
        (logps * factors).sum().backward()
        found.append([logps.detach(), *(leaf.grad for leaf in leaves[: 3 if has_bias else 2])])
    for sliced, full in zip(*found, strict=True):
        torch.testing.assert_close(sliced, full, atol=1e-13, rtol=1e-12)


def test_squared_probabilities_do_not_depend_on_slices(at_once):
    rows, weight, bias, _ = _case(7, 5, 33, torch.float64)
    expected = (rows @ weight.T + bias).softmax(-1).square().sum(-1).log()
    found = log_sum_squared_probs(LMHead(weight, bias, torch.float64, LogitTransform()), rows)
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(scale=0.5, softcap=3.0)])
def test_entropy_does_not_depend_on_slices_and_leaves_the_logps_bitwise(at_once, transform):
    rows, weight, bias, targets = _case(7, 5, 33, torch.float64)
    head = LMHead(weight, bias, torch.float64, transform)
    distribution = torch.distributions.Categorical(logits=transform(rows @ weight.T + bias))
    logps, entropy = target_logps_and_entropy(head, rows.requires_grad_(), targets)
    torch.testing.assert_close(entropy, distribution.entropy(), atol=1e-13, rtol=1e-12)
    assert not entropy.requires_grad
    assert torch.equal(logps, target_logps(head, rows, targets))


def test_a_frozen_head_gets_no_gradient_but_its_input_does():
    rows, weight, _, targets = _case(4, 5, 33, torch.float32)
    rows.requires_grad_()
    target_logps(LMHead(weight, None, torch.float32, LogitTransform()), rows, targets).sum().backward()
    assert weight.grad is None
    assert rows.grad.abs().sum() > 0


def test_bf16_rounds_factors_and_not_logits():
    """Logits near 100 are 0.5 apart in bf16; these must be as exact as the rounded factors allow."""
    rows, weight, _, targets = _case(64, 128, 500, torch.float32)
    rows, weight = (rows * 3).bfloat16().float(), weight.bfloat16().float()  # exact in bf16
    exact = _reference_logps(rows.double(), weight.double(), None, targets, LogitTransform())
    assert (rows @ weight.T).abs().max() > 64
    found = target_logps(LMHead(weight, None, torch.bfloat16, LogitTransform()), rows.bfloat16(), targets)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-3
    rounded = (rows.bfloat16() @ weight.bfloat16().T).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    assert (rounded - exact).abs().max() > 0.05


def test_fp16_rounds_factors_and_not_logits():
    """Logits near 100 are 0.06 apart in fp16; these must be as exact as the rounded factors allow."""
    rows, weight, _, targets = _case(64, 128, 500, torch.float32)
    rounded = [(rows * 3).half().double(), weight.half().double()]
    exact = _reference_logps(*rounded, None, targets, LogitTransform())
    found = target_logps(LMHead(weight, None, torch.float16, LogitTransform()), rows * 3, targets)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-4
    assert (_reference_logps(rows * 3, weight, None, targets, LogitTransform()) - exact).abs().max() > 1e-3


def test_other_matmuls_keep_their_precision():
    """bf16 matmul precision is a global setting: it must be restored, also after an error."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    head = LMHead(torch.randn(8, 4), None, torch.bfloat16, LogitTransform())
    target_logps(head, torch.randn(3, 4), torch.tensor([1, 2, 3]))
    with pytest.raises(RuntimeError):
        head.product(torch.randn(3, 5), torch.randn(4, 8))
    assert torch.backends.mkldnn.matmul.fp32_precision == before


class LargestActivation(TorchDispatchMode):
    """Records the largest tensor of a step; weight shapes (weights, gradients, optimizer state) are excluded."""

    def __init__(self, weight_shapes: set[tuple[int, ...]]):
        super().__init__()
        self.weight_shapes = weight_shapes
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and tuple(leaf.shape) not in self.weight_shapes:
                self.numel = max(self.numel, leaf.numel())
        return result


def test_the_largest_tensor_of_a_step_is_less_than_an_eighth_of_the_logits():
    vocab, layout = 8_000, PackedLayout(shares_prompt=True)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    pairs = tuple(pair_of(90, 45, 60, seed=seed) for seed in range(8))
    inputs = layout.collate(ExampleBatch(torch.arange(8).numpy(), pairs))
    shapes = {tuple(shape) for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    pair_model = PairModel.for_layout(model, torch.float32, layout)
    with LargestActivation(shapes) as largest:
        scored = pair_model.score(inputs)
        (scored.chosen.values.sum() - scored.rejected.values.sum()).backward()
        torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    num_rows = inputs.model_inputs["input_ids"].numel()  # fewer than the tokens of both sequences: the stricter bound
    assert 0 < largest.numel < num_rows * vocab / 8
