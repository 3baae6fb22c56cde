"""zero_stage 1 and 2 keep weights gathered after a forward, and never use them after they change.

Its steps are compared with the oracle in test_parity.py, and its all-gathers are counted in test_communication.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engines.test_sharded_checkpoints import assert_same_bits
from tests.support.engines.agreement import assert_same_weights
from tests.support.engines.parity import Case
from tests.support.engines.saved_runs import SAVED_STEP, Run, train
from tests.support.engines.zero_stage_runs import resume_after_scoring, train_and_score
from thresher.distributed.mesh import ParallelDims

pytestmark = pytest.mark.distributed

TWO_SHARDS = ParallelDims(dp_shard=2)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_scoring_between_steps_sees_the_new_weights_and_does_not_change_a_step(
    two_ranks, model_dirs, oracle, zero_stage
):
    case = Case(TWO_SHARDS, loss="simpo", zero_stage=zero_stage)
    model_dir, _ = model_dirs(case.family, case.num_layers)
    expected = oracle(case)
    alone = train_and_score(replace(case, sizes=ParallelDims()), model_dir)

    for rank in two_ranks.run(train_and_score, case, model_dir):
        assert rank.losses == pytest.approx([logged["loss"] for logged in expected.metrics], abs=1e-5)
        assert rank.grad_norms == pytest.approx(expected.grad_norms, abs=1e-5)
        assert_same_weights(rank.weights, expected.weights)
        for ours, theirs in zip(rank.logps, alone.logps, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    moved = [abs(alone.logps[step + 1][0] - logps[0]) for step, logps in enumerate(alone.logps[:-1])]
    assert min(moved) > 1e-3


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_checkpoint_that_is_loaded_after_scoring_is_what_continues(two_ranks, model_dirs, tmp_path, zero_stage):
    model_dir, _ = model_dirs("llama")
    run = Run(model_dir, tmp_path / "saved", TWO_SHARDS, saves_at=(SAVED_STEP,), zero_stage=zero_stage)
    straight = two_ranks.run(train, run)
    again = replace(run, root=tmp_path / "again", start=run.root / f"step-{SAVED_STEP:08d}", saves_at=())
    resumed = two_ranks.run(resume_after_scoring, again)
    gathered_anew = two_ranks.run(resume_after_scoring, replace(again, zero_stage=3))

    for (logps, result), (of_stage_3, _), uninterrupted in zip(resumed, gathered_anew, straight, strict=True):
        assert logps == of_stage_3
        assert result.losses == uninterrupted.losses[SAVED_STEP:]
        assert_same_bits(result.weights, uninterrupted.weights)
        assert_same_bits(result.moments, uninterrupted.moments)
