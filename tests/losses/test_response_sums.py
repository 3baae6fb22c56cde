"""Sums over the tokens of a response, against exact sums of the same fp32 logps."""

import math
from dataclasses import replace

import pytest
import torch

from tests.support.loss_cases import objective_of
from thresher.losses import ExampleLogps, ObjectiveInputs, ResponseLogps
from thresher.losses.pairs import concat_pairs
from thresher.losses.scores import score_pairs

LD_ALPHA = 0.3


def long_pairs(num_tokens: int) -> ObjectiveInputs:
    """Build two pairs with long responses in fp32; the reference lies near the policy."""
    generator = torch.Generator().manual_seed(0)
    lengths = {
        "chosen": torch.tensor([num_tokens, num_tokens // 3]),
        "rejected": torch.tensor([num_tokens // 2, num_tokens]),
    }
    policy, reference = {}, {}
    for name, side in lengths.items():
        logps = -torch.empty(int(side.sum())).exponential_(0.5, generator=generator)
        noise = 0.1 * torch.randn(logps.shape, generator=generator)
        policy[name] = ResponseLogps(logps.requires_grad_(), side, 0.5 * logps.detach())
        reference[name] = ResponseLogps(logps.detach() + noise, side)
    return ObjectiveInputs(ExampleLogps.of(*policy.values()), ExampleLogps.of(*reference.values()))


def exact_sums(side: ResponseLogps, weights: list[torch.Tensor] | None = None) -> list[float]:
    parts = side.values.detach().double().split(side.lengths.tolist())
    return [
        math.fsum((part if weights is None else part * weight).tolist())
        for part, weight in zip(parts, weights or parts, strict=True)
    ]


def exact_log_ratios(pairs: ObjectiveInputs, name: str) -> list[float]:
    policy, reference = (exact_sums(getattr(model, name)) for model in (pairs.policy, pairs.reference))
    return [one - other for one, other in zip(policy, reference, strict=True)]


@pytest.mark.parametrize("num_tokens", [1_024, 65_536])
def test_sums_and_log_ratios_of_long_responses_are_exact_to_fp64(num_tokens):
    pairs = long_pairs(num_tokens)
    scores = score_pairs(pairs)
    for name in ("chosen", "rejected"):
        sums = exact_sums(getattr(pairs.policy, name))
        assert getattr(scores.logps, name).tolist() == pytest.approx(sums, rel=0, abs=1e-6)
        log_ratios = getattr(scores.log_ratios, name).tolist()
        assert log_ratios == pytest.approx(exact_log_ratios(pairs, name), rel=0, abs=1e-6)


def test_ld_weighted_sums_of_long_responses_are_exact_to_fp64():
    pairs = long_pairs(65_536)
    shared = torch.minimum(pairs.policy.chosen.lengths, pairs.policy.rejected.lengths).tolist()
    scores = score_pairs(pairs, ld_alpha=LD_ALPHA)
    for name in ("chosen", "rejected"):
        side = getattr(pairs.policy, name)
        weights = [
            torch.where(torch.arange(length) < limit, 1.0, torch.tensor(LD_ALPHA, dtype=torch.float64))
            for length, limit in zip(side.lengths.tolist(), shared, strict=True)
        ]
        assert getattr(scores.logps, name).tolist() == pytest.approx(exact_sums(side, weights), rel=0, abs=1e-6)


@pytest.mark.parametrize("ld_alpha", [1.0, LD_ALPHA])
def test_token_weights_multiply_each_logp_and_log_ratio(ld_alpha):
    pairs, generator = long_pairs(1_024), torch.Generator().manual_seed(1)
    sides = [
        replace(side, token_weights=2 * torch.rand(side.values.shape, generator=generator))
        for side in pairs.policy.sides
    ]
    weighted = replace(pairs, policy=ExampleLogps(tuple(sides)))
    scores = score_pairs(weighted, ld_alpha=ld_alpha)
    shared = torch.minimum(*(side.lengths for side in sides)).tolist()
    for number, name in enumerate(("chosen", "rejected")):
        side = sides[number]
        weights = [
            each.double()
            * torch.where(torch.arange(len(each)) < limit, 1.0, torch.tensor(ld_alpha, dtype=torch.float64))
            for each, limit in zip(side.token_weights.split(side.lengths.tolist()), shared, strict=True)
        ]
        sums, of_reference = (exact_sums(model.sides[number], weights) for model in (pairs.policy, pairs.reference))
        assert getattr(scores.logps, name).tolist() == pytest.approx(sums, rel=0, abs=1e-5)
        expected = [one - other for one, other in zip(sums, of_reference, strict=True)]
        assert getattr(scores.log_ratios, name).tolist() == pytest.approx(expected, rel=0, abs=1e-5)
    nll = exact_sums(sides[0], [each.double() for each in sides[0].token_weights.split(sides[0].lengths.tolist())])
    assert scores.chosen_nll.tolist() == pytest.approx([-each for each in nll], rel=0, abs=1e-5)
    metrics = [objective_of("sigmoid", {"beta": 0.1})(each).metrics for each in (pairs, weighted)]
    assert metrics[0]["logps/chosen"] == metrics[1]["logps/chosen"]  # what the model gives, unweighted
    assert metrics[0]["rewards/chosen"].sum != metrics[1]["rewards/chosen"].sum


def test_token_weights_follow_humanlines_clamp():
    pairs = long_pairs(1_024)
    sides = [replace(side, token_weights=torch.full_like(side.values, 0.5)) for side in pairs.policy.sides]
    weighted = replace(pairs, policy=ExampleLogps(tuple(sides)))
    clamped, halved = (score_pairs(each, clamp_log_ratio=(-0.05, 0.05)).log_ratios for each in (pairs, weighted))
    for one, half in zip(clamped, halved, strict=True):
        assert half.tolist() == pytest.approx((0.5 * one).tolist(), abs=1e-9)


def test_a_micro_batch_without_token_weights_weighs_its_tokens_by_one():
    pairs = long_pairs(16)
    sides = [replace(side, token_weights=torch.full_like(side.values, 0.5)) for side in pairs.policy.sides]
    weighted = replace(pairs, policy=ExampleLogps(tuple(sides)))
    joined = score_pairs(concat_pairs([weighted, pairs])).log_ratios
    for both, one in zip(joined, score_pairs(pairs).log_ratios, strict=True):
        assert both.tolist() == pytest.approx([*(0.5 * one).tolist(), *one.tolist()])


def test_metrics_of_long_responses_are_exact_to_fp64():
    pairs = long_pairs(65_536)
    metrics = objective_of("sigmoid", {"beta": 0.1})(pairs).metrics
    chosen, rejected = (exact_log_ratios(pairs, name) for name in ("chosen", "rejected"))
    margins = [0.1 * (one - other) for one, other in zip(chosen, rejected, strict=True)]
    expected = {
        "logps/chosen": math.fsum(exact_sums(pairs.policy.chosen)) / 2,
        "rewards/margins": math.fsum(margins) / 2,
        "kl": math.fsum(chosen + rejected) / 4,
    }
    assert {name: metrics[name].mean for name in expected} == pytest.approx(expected, rel=0, abs=1e-6)


def test_the_gradient_of_a_sum_has_the_dtype_of_its_logps():
    pairs = long_pairs(64)
    objective_of("sigmoid")(pairs).per_pair.sum().backward()
    assert pairs.policy.chosen.values.grad.dtype is torch.float32
