"""Every mesh trains like the oracle (examples/minimal_dpo.py) and logs what one process logs."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines.agreement import (
    EXACT,
    TOLERANCES,
    assert_agree,
    assert_logs_of_one_process,
    assert_parity,
    assert_same_weights,
    distance,
    run_parallel,
)
from tests.support.engines.parity import (
    Case,
    leaves_rows_out,
    micro_batching_of,
    score_parallel,
    score_single_process,
)
from tests.support.engines.parity_cases import (
    AGAINST_ONE_PROCESS,
    ALL_CASES,
    EXPERTS,
    IN_BF16,
    IN_FP16,
    INTERLEAVED,
    MATRIX,
    MESHES,
    TWO_STAGES,
    render_table,
    table_in_docs,
)
from tests.support.engines.pipeline_runs import score
from thresher.distributed.mesh import ParallelDims
from thresher.engines.accumulate import TokenCounts

distributed = pytest.mark.distributed


@pytest.mark.covered
@distributed
@pytest.mark.parametrize("case", [*MATRIX, *EXPERTS], ids=str)
def test_three_steps_on_every_mesh_equal_the_oracle(case, pool_of, model_dirs, oracle, one_process, agreed):
    outcomes = run_parallel(case, pool_of, model_dirs)

    expected = oracle(case)
    assert_parity(case, outcomes, expected, one_process(case))
    if case.max_grad_norm < 1:
        assert min(expected.grad_norms) > 50 * case.max_grad_norm
    agreed(case)


@pytest.mark.covered
@distributed
@pytest.mark.parametrize("case", AGAINST_ONE_PROCESS, ids=str)
def test_cases_without_an_oracle_equal_one_process(case, pool_of, model_dirs, one_process, agreed):
    outcomes = run_parallel(case, pool_of, model_dirs)

    alone = one_process(case)
    assert alone.skipped_steps == (0 if case.nonfinite_pair is None else 1)
    for outcome in outcomes:
        assert outcome.skipped_steps == alone.skipped_steps
        # a pipeline stage has a part of the weights
        assert_same_weights(outcome.weights, {name: alone.weights[name] for name in outcome.weights})
    if case.nonfinite_pair is None:
        assert_logs_of_one_process(outcomes, alone)
    agreed(case)


@pytest.mark.covered
@distributed
@pytest.mark.parametrize("case", [*IN_BF16, *IN_FP16], ids=str)
def test_three_steps_in_half_precision_agree_to_its_precision(case, pool_of, model_dirs, oracle, one_process, agreed):
    outcomes = run_parallel(case, pool_of, model_dirs)

    alone, exact = one_process(case), oracle(case)
    for outcome in outcomes:
        assert outcome.skipped_steps == 0
        # several processes round as much as one, at other elements; a pipeline stage has a part of the weights
        expected, of_one = ({name: each.weights[name] for name in outcome.weights} for each in (exact, alone))
        by_rounding = distance(of_one, expected)
        assert 0 < distance(outcome.weights, expected) < 1.5 * by_rounding
        for logged, of_oracle, norm in zip(outcome.metrics, exact.metrics, exact.grad_norms, strict=True):
            assert_agree(logged, {"loss": of_oracle["loss"], "grad_norm": norm}, tolerance=TOLERANCES[case.dtype])
    agreed(case)


@distributed
@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: str(Case(sizes)))
def test_a_parallel_reference_scores_as_in_one_process(sizes, pool_of, model_dirs):
    _, model_dir = model_dirs("llama")
    case = Case(sizes)

    for rank, num_ranks, found in pool_of(sizes.num_processes).run(score_parallel, case, model_dir):
        expected = score_single_process(case, model_dir, rank, num_ranks)
        assert len(found) == len(expected)
        for scores, of_one in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(scores), torch.tensor(of_one), rtol=EXACT, atol=EXACT)


@distributed
def test_fsdp_keeps_skipping_unscored_rows(pool_of, model_dirs):
    # FSDP2 renames the class of every layer
    assert all(pool_of(2).run(leaves_rows_out, Case(ParallelDims(dp_shard=2)), model_dirs("llama")[0]))


def micro_batches_of_ranks(case: Case) -> list[list[int]]:
    """How many micro-batches each data rank has in each step."""
    cut = micro_batching_of(case).split
    num_ranks = case.sizes.num_data_ranks
    steps = [case.plan.pair_ids(step) for step in range(case.plan.num_steps)]
    return [[len(cut(pair_ids, rank, num_ranks)) for rank in range(num_ranks)] for pair_ids in steps]


def test_token_counts_are_added_by_kind():
    assert TokenCounts(7, 5, 3) + TokenCounts(60, 40, 20) == TokenCounts(67, 45, 23)


def test_steps_have_several_micro_batches():
    # Partial gradients over tp (q and k norms of Qwen 3) are summed once per step; the hook of transformers sums them
    # after every backward, which is right only for the first micro-batch of a step.
    for case in ALL_CASES:
        if case.also != "fewer pairs than ranks":
            assert all(max(counts) > 1 for counts in micro_batches_of_ranks(case)), case


def test_cases_cover_what_their_names_say():
    def steps_of(also: str) -> list[list[int]]:
        return [counts for case in ALL_CASES if case.also == also for counts in micro_batches_of_ranks(case)]

    assert all(case.sizes.num_processes > 1 for case in ALL_CASES)

    assert any(len(set(counts)) > 1 for counts in steps_of("ranks with different numbers of micro-batches"))
    fewer_pairs = steps_of("fewer pairs than ranks")
    assert fewer_pairs
    assert all(0 in counts for counts in fewer_pairs)
    assert len(set(map(str, ALL_CASES))) == len(ALL_CASES)


def test_the_table_in_the_docs_lists_what_is_tested():
    assert table_in_docs() == render_table(ALL_CASES), (
        "write it anew: scripts/test all tests/engines -m distributed --parity-table docs/internals/testing.md"
    )


@distributed
@pytest.mark.parametrize(
    "case",
    [
        Case(ParallelDims(tp=2)),
        Case(ParallelDims(tp=2), "padded"),
        Case(ParallelDims(cp=2)),
        Case(TWO_STAGES),
        Case(TWO_STAGES, "padded", virtual_pp_size=INTERLEAVED),
    ],
    ids=str,
)
def test_every_rank_receives_the_logps_and_their_statistics(two_ranks, model_dirs, case):
    """The statistics are WPO's sum of squared probabilities and the entropy, over the whole vocabulary."""
    path, batches = model_dirs(case.family)[0], [[4, 1, 7, 2, 9], [3], []]
    expected = score(Case(ParallelDims(), case.layout), path, batches)
    for scored in two_ranks.run(score, case, path, batches):
        for ours, theirs in zip(scored, expected, strict=True):
            for found, right in ((ours.chosen, theirs.chosen), (ours.rejected, theirs.rejected)):
                assert torch.equal(found.lengths, right.lengths)
                for name in ("values", "log_sum_squared_probs", "entropy"):
                    torch.testing.assert_close(getattr(found, name), getattr(right, name), atol=1e-5, rtol=1e-5)
