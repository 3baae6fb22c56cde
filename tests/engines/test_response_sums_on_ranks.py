"""Every layout and engine sums the logps of a response in fp64, over the tokens and over the ranks.

A response of 64k tokens has about -2e5 nats, and 1e-5 of them are 5e-11: the relative error allowed here is smaller, so
that the length of the responses does not matter. One sum in fp32 would be off by 1e-8 or more.
"""

from __future__ import annotations

import math

import pytest

from tests.support.engines.parity import BETA, save_model
from tests.support.engines.summed_runs import NUM_PAIRS, train_step

pytestmark = pytest.mark.distributed

RELATIVE = 1e-12


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "llama", seed=0)


def check(steps):
    by_rank = {step.data_rank: step.tokens for step in steps}
    responses = [each for _, tokens in sorted(by_rank.items()) for each in tokens]
    assert len(responses) == 2 * NUM_PAIRS
    policy, reference = ([math.fsum(response[model]) for response in responses] for model in (0, 1))
    ratios = [one - other for one, other in zip(policy, reference, strict=True)]
    expected = {
        "logps/chosen": math.fsum(policy[::2]) / NUM_PAIRS,
        "logps/rejected": math.fsum(policy[1::2]) / NUM_PAIRS,
        "rewards/chosen": BETA * math.fsum(ratios[::2]) / NUM_PAIRS,
        "rewards/rejected": BETA * math.fsum(ratios[1::2]) / NUM_PAIRS,
        "rewards/margins": BETA * (math.fsum(ratios[::2]) - math.fsum(ratios[1::2])) / NUM_PAIRS,
        "kl": math.fsum(ratios) / (2 * NUM_PAIRS),
    }
    tolerance = RELATIVE * max(map(abs, policy))
    for step in steps:
        assert {name: step.metrics[name] for name in expected} == pytest.approx(expected, rel=0, abs=tolerance)


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_every_layout_sums_in_fp64(model_dir, layout):
    check([train_step(model_dir, {}, layout)])


@pytest.mark.parametrize("axes", [{}, {"dp_replicate": 2}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2}], ids=str)
def test_every_axis_sums_in_fp64(two_ranks, model_dir, axes):
    check(two_ranks.run(train_step, model_dir, axes, "shared"))
