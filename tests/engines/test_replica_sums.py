"""Gradients of replicas: summed in the last backward, bitwise as after it, and no message of a step goes over gloo."""

from __future__ import annotations

import pytest
import torch

from tests.support.engines.agreement import OF_WEIGHTS
from tests.support.engines.parity import Case, train_parallel
from tests.support.engines.replica_steps import host_collectives_of_step, sums_of_step
from thresher.distributed.mesh import ParallelDims

pytestmark = pytest.mark.distributed
SMALL = 1 << 10  # elements per bucket: several for the tiny model


@pytest.mark.parametrize(
    ("counts", "recompute", "has_unused"),
    [([1, 1], "off", False), ([3, 1], "full", False), ([0, 2], "off", False), ([2, 0], "off", True)],
)
def test_sums_are_bitwise_those_of_whole_gradients_after_the_backward(two_ranks, counts, recompute, has_unused):
    for _, found, expected in two_ranks.run(sums_of_step, counts, SMALL, recompute, has_unused):
        assert found.keys() == expected.keys()
        assert (expected.get("unused") is None) == (found.get("unused") is None)
        for name, gradient in expected.items():
            assert gradient is found[name] is None or torch.equal(found[name], gradient), name


def test_buckets_start_in_the_last_backward_and_at_the_end_on_a_rank_without_pairs(two_ranks):
    (busy, _, _), (idle, _, _) = two_ranks.run(sums_of_step, [2, 0], SMALL)
    assert len(busy) == len(idle) > 3
    assert set(busy) == {"backward"}
    assert set(idle) == {"finish"}


MESHES = (
    ParallelDims(dp_replicate=2),
    ParallelDims(dp_shard=2),
    ParallelDims(tp=2),
    ParallelDims(pp=2),
    ParallelDims(cp=2),
)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_step_has_no_collective_of_host_memory(two_ranks, model_dirs, sizes):
    case = Case(sizes, loss="simpo")
    assert two_ranks.run(host_collectives_of_step, case, model_dirs(case.family, case.num_layers)[0]) == [[], []]


@pytest.mark.parametrize(
    "case",
    [
        Case(ParallelDims(dp_shard=2, ep=2), loss="simpo", family="qwen3_moe", router_loss_coef=0.1),
        Case(ParallelDims(dp_replicate=2), loss="kto"),
    ],
    ids=["experts and their balance", "kto"],
)
def test_neither_the_balance_of_experts_nor_the_reference_point_of_kto_adds_one(two_ranks, model_dirs, case):
    dirs = model_dirs(case.family, case.num_layers)
    assert two_ranks.run(host_collectives_of_step, case, *dirs) == [[], []]


def test_a_loss_that_couples_pairs_gathers_them_once(two_ranks, model_dirs):
    case = Case(ParallelDims(dp_replicate=2), loss="aot")
    found = two_ranks.run(host_collectives_of_step, case, *model_dirs(case.family, case.num_layers))
    assert found == [["all_gather_object"]] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_replicas_of_a_pipeline_train_like_one_process(four_ranks, one_process, model_dirs, schedule):
    case = Case(ParallelDims(pp=2, dp_replicate=2), pp_schedule=schedule)
    expected = one_process(case)
    for found in four_ranks.run(train_parallel, case, *model_dirs(case.family, case.num_layers)):
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
        for name, weight in found.weights.items():
            assert (weight - expected.weights[name]).abs().max() < OF_WEIGHTS, name
