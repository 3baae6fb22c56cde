"""Selective recomputation repeats cheap operations alone, and keeps less than a backward needs."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.support.tiny_models import MIXED, tiny_model
from thresher.config.roles import TrainingArgs
from thresher.engines.accumulate import MicroBatch
from thresher.engines.engine import TrainEngine
from thresher.engines.native.build import train_engine
from thresher.losses.objective import Objective
from thresher.losses.registry import make_losses
from thresher.models.layouts import PackedLayout
from thresher.models.loading.adapters import LoraSettings
from thresher.models.loading.trained import TrainedParts
from thresher.models.logps import base_model
from thresher.models.optimizations.recompute import _LayerPolicy, recompute_activations
from thresher.plan.simulate.counters import LiveBytes

OBJECTIVE = Objective(terms=((make_losses(["sft"], {})[0], 1.0),))
LORA = TrainedParts(lora=LoraSettings(2, None, ["all-linear"]))
# in the forward of a Llama layer: queries, keys, values, output, gate, up, down
PRODUCTS_PER_LAYER = 7


class Operations(TorchDispatchMode):
    """How often each operation is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def policy_with(recompute: str, trained: TrainedParts = TrainedParts()) -> TrainEngine:  # noqa: B008  # frozen
    model = tiny_model("llama")
    module = trained.apply(model)
    trained.init(model, seed=0)
    recompute_activations(base_model(module), recompute)
    settings = TrainingArgs(learning_rate=1e-3)
    return train_engine(module, PackedLayout(shares_prompt=True), torch.float32, settings)


def calls_of_step(recompute: str, trained: TrainedParts = TrainedParts()) -> Counter[str]:  # noqa: B008
    policy = policy_with(recompute, trained)
    with Operations() as counted:
        policy.accumulate([MicroBatch(MIXED, None)], OBJECTIVE, len(MIXED))
    return counted.calls


def test_neither_products_nor_attention_are_repeated():
    off, selective, full = (calls_of_step(recompute) for recompute in ("off", "selective", "full"))
    num_layers = tiny_model("llama").config.num_hidden_layers
    for name in ("aten.mm.default", "thresher.segmented_flash.default"):
        assert selective[name] == off[name] > 0
    assert full["aten.mm.default"] == off["aten.mm.default"] + (PRODUCTS_PER_LAYER - 1) * num_layers
    assert full["thresher.segmented_flash.default"] == 2 * off["thresher.segmented_flash.default"]
    assert selective["aten.silu.default"] == full["aten.silu.default"] > off["aten.silu.default"]


def test_of_an_adapter_only_the_product_with_a_narrow_matrix_is_repeated():
    selective, full = (calls_of_step(recompute, LORA) for recompute in ("selective", "full"))
    kept = 2 * PRODUCTS_PER_LAYER * tiny_model("llama").config.num_hidden_layers  # of a matrix, and its lora_A
    assert full["aten.mm.default"] - selective["aten.mm.default"] == kept


@pytest.mark.parametrize("trained", [TrainedParts(), LORA], ids=["full", "LoRA"])
def test_gradients_are_bitwise_those_without_recomputation(trained):
    gradients = []
    for recompute in ("off", "selective"):
        policy = policy_with(recompute, trained)
        policy.accumulate([MicroBatch(MIXED, None)] * 2, OBJECTIVE, 2 * len(MIXED))
        gradients.append({name: p.grad for name, p in policy.model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("recompute", ["off", "selective", "full"])
def test_no_gradient_is_computed_below_the_first_adapter(recompute):
    """transformers makes the output of a frozen embedding a leaf, which gets one."""
    policy = policy_with(recompute, LORA)
    outputs = []
    embedding = base_model(policy.model).get_input_embeddings()
    embedding.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    policy.accumulate([MicroBatch(MIXED, None)], OBJECTIVE, len(MIXED))
    assert outputs
    assert not any(output.requires_grad for output in outputs)


def test_between_forward_and_backward_selective_keeps_less_than_off_and_more_than_full():
    held = {}
    for recompute in ("off", "selective", "full"):
        policy = policy_with(recompute)
        with LiveBytes() as live:
            scored = policy.executor.model.score(policy.executor.layout.collate(MIXED))
            held[recompute] = live.live
        assert scored.chosen.values.requires_grad
    print(held)
    assert held["full"] < held["selective"] < 0.9 * held["off"]


@pytest.mark.slow  # compiles C++
def test_results_of_compiled_code_are_kept():
    kept: list[str] = []

    def attend(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.T, dim=-1) @ x

    # as FlexAttention is compiled, whose backward has no CPU kernel
    compiled = torch.compile(attend, options={"wrap_inductor_compiled_regions": True})

    def layer(x: torch.Tensor) -> torch.Tensor:
        return compiled(x.sin()).cos()

    def policy(context: Any, operation: Any, *args: Any, **settings: Any) -> CheckpointPolicy:
        decision = _LayerPolicy(4, None)(context, operation, *args, **settings)
        kept.extend([operation.name()] if decision == CheckpointPolicy.MUST_SAVE else [])
        return decision

    x = torch.randn(8, 4, requires_grad=True)
    layer(x).sum().backward()
    expected, x.grad = x.grad, None
    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(layer, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert kept == ["inductor_compiled_code"]
    torch.testing.assert_close(x.grad, expected)
