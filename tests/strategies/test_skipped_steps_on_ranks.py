"""A loss or gradient that is not finite on one rank alone: all skip the step, and all name the same pairs."""

from __future__ import annotations

import pytest

from tests.support.strategies.parity import PAIRS, Case
from tests.support.strategies.skipped_runs import train_spoilt
from thresher.data.store.arrow_schema import hash_pair
from thresher.distributed.mesh import ParallelDims
from thresher.training.skipped_steps import NonFinitePair

pytestmark = pytest.mark.distributed

SPOILT = 0
CASES = [
    Case(ParallelDims(dp_replicate=2), spoilt_pair=SPOILT),
    Case(ParallelDims(dp_replicate=2), loss="aot", spoilt_pair=SPOILT),
    Case(ParallelDims(dp_shard=2), layout="padded", spoilt_pair=SPOILT),
    Case(ParallelDims(tp=2), spoilt_pair=SPOILT),
    Case(ParallelDims(cp=2), spoilt_pair=SPOILT),
    Case(ParallelDims(pp=2), spoilt_pair=SPOILT),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_process_skips_the_step_and_names_the_one_pair(case, pool_of, model_dirs):
    outcomes = pool_of(case.sizes.num_processes).run(train_spoilt, case, *model_dirs(case.family))
    step = next(step for step in range(3) if SPOILT in case.plan.pair_ids(step))
    culprit = NonFinitePair(SPOILT, hash_pair(PAIRS[SPOILT]).pair.hex(), "reference logps")
    for outcome in outcomes:
        assert [skipped is not None for skipped in outcome.skipped] == [at == step for at in range(3)]
        assert outcome.skipped[step].pairs == (culprit,)
        assert outcome.skipped[step].reason == "loss"
        assert outcome.steps == [1, 2, 3]
        before = [outcome.before, *outcome.digests]
        # not a bit of weights or moments moves in the skipped step, and some do in every other
        assert [one == other for one, other in zip(before, outcome.digests, strict=False)] == [
            at == step for at in range(3)
        ]


@pytest.mark.parametrize("sizes", [ParallelDims(dp_replicate=2), ParallelDims(dp_shard=2)], ids=["replicate", "shard"])
def test_a_gradient_that_overflows_on_one_rank_is_skipped_by_both(sizes, pool_of, model_dirs):
    """The loss of the step stays finite; no pair can be told apart, so that all of the step are named."""
    case = Case(sizes)
    outcomes = pool_of(2).run(train_spoilt, case, *model_dirs(case.family), 1e30)
    for outcome in outcomes:
        assert [skipped is not None for skipped in outcome.skipped] == [False, True, False]
        assert outcome.skipped[1].reason == "gradient"
        assert [pair.number for pair in outcome.skipped[1].pairs] == case.plan.pair_ids(1).tolist()
        assert {pair.source for pair in outcome.skipped[1].pairs} == {None}
        assert outcome.digests[0] == outcome.digests[1] != outcome.digests[2]
