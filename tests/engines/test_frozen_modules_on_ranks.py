"""Frozen modules on ranks that shard the model: the step of one process, and unchanged bits."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines.agreement import OF_WEIGHTS
from tests.support.engines.parity import Case, train_parallel
from thresher.distributed.mesh import ParallelDims

pytestmark = pytest.mark.distributed


def test_sharded_ranks_train_like_one_process_with_frozen_modules(two_ranks, one_process, model_dirs):
    case = Case(ParallelDims(dp_shard=2), frozen=("model.embed_tokens", "model.layers.0", "model.layers.1.mlp"))
    found = two_ranks.run(train_parallel, case, *model_dirs(case.family, case.num_layers))[0]
    expected = one_process(case)
    assert found.weights.keys() == expected.weights.keys()
    assert not any(name.startswith(case.frozen) for name in found.weights)
    for name, weight in expected.weights.items():
        assert (found.weights[name] - weight).abs().max() < OF_WEIGHTS, name
    for name, (before, after) in found.frozen_weights.items():
        assert torch.equal(before, after), name
    assert len(found.frozen_weights) == 1 + 9 + 3
