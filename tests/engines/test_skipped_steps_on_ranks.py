"""A loss or gradient that is non-finite on one rank: all ranks skip the step and name the same pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.engines.parity import PAIRS, Case
from tests.support.engines.skipped_runs import train_until_the_scale_fits, train_with_nonfinite_step
from thresher.data.store.arrow_schema import hash_example
from thresher.distributed.mesh import ParallelDims
from thresher.training.records import NonFiniteExample

pytestmark = pytest.mark.distributed

NONFINITE = 0
CASES = [
    Case(ParallelDims(dp_replicate=2), nonfinite_pair=NONFINITE),
    Case(ParallelDims(dp_replicate=2), loss="aot", nonfinite_pair=NONFINITE),
    Case(ParallelDims(dp_shard=2), layout="padded", nonfinite_pair=NONFINITE),
    Case(ParallelDims(tp=2), nonfinite_pair=NONFINITE),
    Case(ParallelDims(cp=2), nonfinite_pair=NONFINITE),
    Case(ParallelDims(pp=2), nonfinite_pair=NONFINITE),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_process_skips_the_step_and_names_the_non_finite_pair(case, pool_of, model_dirs):
    outcomes = pool_of(case.sizes.num_processes).run(
        train_with_nonfinite_step, case, *model_dirs(case.family, case.num_layers)
    )
    step = next(step for step in range(3) if NONFINITE in case.plan.pair_ids(step))
    culprit = NonFiniteExample(NONFINITE, hash_example(PAIRS[NONFINITE]).pair.hex(), "reference logps")
    for outcome in outcomes:
        assert [skipped is not None for skipped in outcome.skipped] == [at == step for at in range(3)]
        assert outcome.skipped[step].pairs == (culprit,)
        assert outcome.skipped[step].reason == "loss"
        assert outcome.steps == [1, 2, 3]
        before = [outcome.before, *outcome.digests]
        # the skipped step leaves weights and moments bitwise unchanged, every other one does not
        assert [one == other for one, other in zip(before, outcome.digests, strict=False)] == [
            at == step for at in range(3)
        ]


@pytest.mark.parametrize("sizes", [ParallelDims(dp_replicate=2), ParallelDims(dp_shard=2)], ids=["replicate", "shard"])
def test_a_gradient_that_overflows_on_one_rank_is_skipped_by_both(sizes, pool_of, model_dirs):
    """The loss stays finite, so no single pair is responsible and all pairs of the step are named."""
    case = Case(sizes)
    outcomes = pool_of(2).run(train_with_nonfinite_step, case, *model_dirs(case.family, case.num_layers), 1e30)
    for outcome in outcomes:
        assert [skipped is not None for skipped in outcome.skipped] == [False, True, False]
        assert outcome.skipped[1].reason == "gradient"
        assert [pair.number for pair in outcome.skipped[1].pairs] == case.plan.pair_ids(1).tolist()
        assert {pair.fault for pair in outcome.skipped[1].pairs} == {None}
        assert outcome.digests[0] == outcome.digests[1] != outcome.digests[2]


@pytest.mark.parametrize("sizes", [ParallelDims(dp_replicate=2), ParallelDims(dp_shard=2)], ids=["replicate", "shard"])
def test_an_fp16_overflow_on_one_rank_halves_the_loss_scale_of_both(sizes, pool_of, model_dirs):
    case = Case(sizes, dtype=torch.float16)
    for outcome in pool_of(2).run(train_with_nonfinite_step, case, *model_dirs(case.family, case.num_layers), 1e6):
        assert [skipped is not None for skipped in outcome.skipped] == [False, True, False]
        overflow = outcome.skipped[1]
        assert (overflow.reason, overflow.pairs, overflow.consecutive) == ("overflow", (), 0)
        assert overflow.loss_scale == 2**15
        assert outcome.digests[0] == outcome.digests[1] != outcome.digests[2]


AXES = [ParallelDims(**{axis: 2}) for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp")]


@pytest.mark.parametrize("sizes", AXES, ids=lambda sizes: str(Case(sizes)))
def test_a_loss_scale_that_is_too_large_falls_alike_on_all_ranks_and_leaves_no_trace(sizes, pool_of, model_dirs):
    """The steps after the overflows equal those of a run that starts with the scale they end at, bitwise."""
    case = Case(sizes, dtype=torch.float16, initial_loss_scale=2.0**27)
    first, second = pool_of(2).run(train_until_the_scale_fits, case, *model_dirs(case.family, case.num_layers))
    assert first.scales == second.scales
    assert len(first.scales) > 1
    fits = replace(case, initial_loss_scale=first.scales[-1])
    restarted = pool_of(2).run(train_until_the_scale_fits, fits, *model_dirs(case.family, case.num_layers))
    for found, expected in zip((first, second), restarted, strict=True):
        assert expected.scales == [first.scales[-1]]
        assert found.digests == expected.digests
