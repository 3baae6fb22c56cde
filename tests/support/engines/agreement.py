"""Assertions that a case trains like the oracle, and logs what one process logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from tests.support.engines.parity import Case, Outcome, train_parallel

EXACT, OF_WEIGHTS = 1e-5, 2e-5
# 2.5 times the last of the eight bits of bf16, and of the eleven of fp16
TOLERANCES = {torch.bfloat16: 0.01, torch.float16: 0.00125}
# depends on which pairs are padded together, and so on the number of ranks
OF_THE_CUT = {"tokens/padding"}


def assert_agree(found: Mapping[str, float], expected: Mapping[str, float], tolerance: float = EXACT) -> None:
    """Compare within a tolerance, relative above 1 and absolute below."""
    assert found.keys() >= expected.keys()
    apart = {
        name: (found[name], number)
        for name, number in expected.items()
        if not math.isclose(found[name], number, rel_tol=tolerance, abs_tol=tolerance)
    }
    assert not apart


def assert_same_weights(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float = OF_WEIGHTS
) -> None:
    assert found.keys() == expected.keys()
    distances = {name: (found[name] - weight).abs().max().item() for name, weight in expected.items()}
    assert max(distances.values()) < tolerance, distances


def distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((found[name] - weight).square().sum()) for name, weight in expected.items()))


def run_parallel(case: Case, pool_of, model_dirs):
    return pool_of(case.sizes.num_processes).run(train_parallel, case, *model_dirs(case.family, case.num_layers))


def assert_logs_of_one_process(outcomes: Sequence[Outcome], alone: Outcome, tolerance: float = EXACT) -> None:
    for outcome in outcomes:
        assert len(outcome.metrics) == len(alone.metrics)
        for logged, expected in zip(outcome.metrics, alone.metrics, strict=True):
            assert logged.keys() == expected.keys()
            assert_agree(logged, {name: expected[name] for name in expected.keys() - OF_THE_CUT}, tolerance)


def assert_parity(case: Case, outcomes: Sequence[Outcome], oracle: Outcome, alone: Outcome) -> None:
    """Every rank makes the oracle's steps, and logs what one process logs."""
    # the oracle's rewards are DPO's
    names = oracle.metrics[0].keys() if case.loss == "sigmoid" else {"loss"}
    for outcome in outcomes:
        for logged, of_oracle, norm in zip(outcome.metrics, oracle.metrics, oracle.grad_norms, strict=True):
            assert_agree(logged, {name: of_oracle[name] for name in names} | {"grad_norm": norm})
        assert_same_weights(outcome.weights, oracle.weights)
    assert_logs_of_one_process(outcomes, alone)


def assert_as_one_process(case: Case, outcomes: Sequence[Outcome], alone: Outcome) -> None:
    """Every rank ends with one process's weights, keeps frozen ones bitwise, and logs the same."""
    assert case.frozen == () or outcomes[0].frozen_weights
    for outcome in outcomes:
        assert_same_weights(outcome.weights, alone.weights)
        for name, (before, after) in outcome.frozen_weights.items():
            assert torch.equal(before, after), name
    assert_logs_of_one_process(outcomes, alone)
