"""Weights in the compute precision: one copy per step, and the gradients of a copy per micro-batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiny_models import MIXED, tiny_model
from thresher.config.roles import TrainingArgs
from thresher.engines.accumulate import MicroBatch
from thresher.engines.engine import TrainEngine
from thresher.engines.native.build import train_engine
from thresher.losses.objective import Objective
from thresher.losses.registry import make_losses
from thresher.models.layouts import PackedLayout

NUM_MICRO_BATCHES = 3


class Casts(TorchDispatchMode):
    """How often one tensor is cast to bf16."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.count, self._weight = 0, weight

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = func is torch.ops.aten._to_copy.default and args[0] is self._weight
        self.count += is_cast and kwargs["dtype"] == torch.bfloat16
        return func(*args, **(kwargs or {}))


def policy_and_objective() -> tuple[TrainEngine, Objective]:
    settings = TrainingArgs(learning_rate=1e-3)
    policy = train_engine(tiny_model("llama"), PackedLayout(shares_prompt=True), torch.bfloat16, settings)
    return policy, Objective(terms=((make_losses(["sft"], {})[0], 1.0),))


@pytest.mark.parametrize(("recomputes", "expected"), [(False, 1), (True, 2 * NUM_MICRO_BATCHES)])
def test_a_step_casts_a_trained_weight_once_unless_layers_are_recomputed(recomputes, expected):
    policy, objective = policy_and_objective()
    if recomputes:
        policy.model.gradient_checkpointing_enable()
    with Casts(policy.model.get_submodule("model.layers.0.mlp.down_proj").weight) as casts:
        policy.accumulate([MicroBatch(MIXED, None)] * NUM_MICRO_BATCHES, objective, NUM_MICRO_BATCHES * len(MIXED))
    assert casts.count == expected


def test_shared_copies_give_the_gradients_of_copies_per_micro_batch_bitwise():
    policy, objective = policy_and_objective()
    number = NUM_MICRO_BATCHES * len(MIXED)
    policy.accumulate([MicroBatch(MIXED, None)] * NUM_MICRO_BATCHES, objective, number)
    shared = {name: copy.deepcopy(p.grad) for name, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    for _ in range(NUM_MICRO_BATCHES):
        policy.accumulate([MicroBatch(MIXED, None)], objective, number)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter.grad, shared[name]), name


def test_a_step_uses_the_weights_that_the_step_before_it_made():
    """No copy outlives a step."""
    policy, objective = policy_and_objective()
    before = policy.score(MIXED).chosen.values
    policy.train_step([MicroBatch(MIXED, None)], objective, num_pairs_in_step=len(MIXED), learning_rate=0.1)
    after = policy.score(MIXED).chosen.values
    fresh, _ = policy_and_objective()
    fresh.model.load_state_dict(policy.model.state_dict())
    assert torch.equal(fresh.score(MIXED).chosen.values, after)
    assert not torch.equal(before, after)
