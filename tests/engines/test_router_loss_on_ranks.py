"""The load-balancing loss of a mixture-of-experts model on several ranks is that of one process."""

from __future__ import annotations

import pytest

from tests.support.engines.agreement import EXACT, OF_THE_CUT, OF_WEIGHTS
from tests.support.engines.parity import Case, train_replicated
from thresher.distributed.mesh import ParallelDims

pytestmark = pytest.mark.distributed


def test_replicas_balance_the_experts_like_one_process(two_ranks, one_process, model_dirs):
    case = Case(ParallelDims(dp_replicate=2), family="qwen3_moe", router_loss_coef=0.5)
    found = two_ranks.run(train_replicated, case, *model_dirs(case.family, case.num_layers))[0]
    expected = one_process(case)
    for one, other in zip(found.metrics, expected.metrics, strict=True):
        assert other["moe_aux_loss"] > 0.5
        for name in other.keys() - OF_THE_CUT:
            assert one[name] == pytest.approx(other[name], abs=EXACT, rel=EXACT), name
    for name, weight in expected.weights.items():
        assert (found.weights[name] - weight).abs().max() < OF_WEIGHTS, name
