"""Losses that fit the data's scores, against torch's own divergences, and the margins that they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, kl_divergence

from tests.support.loss_cases import SCORED_LOSSES, objective_of, random_pairs
from thresher.losses import ExampleLogps, ObjectiveInputs

BETA, SCALE = 0.3, 0.7
MARGINS = torch.tensor([2.0, -1.0, 0.0, 0.5, 4.0, -0.25])


def expected(name: str, margin: Tensor, given: Tensor) -> Tensor:
    x, g = BETA * margin, SCALE * given.double()
    policy, scores = Bernoulli(logits=x), Bernoulli(logits=g)
    return {
        "rpo_sq": (x - g) ** 2,
        "rpo_bwd_kl": kl_divergence(scores, policy),
        "rpo_fwd_kl": kl_divergence(policy, scores),
    }[name]


def log_ratio_margin(pairs: ObjectiveInputs) -> Tensor:
    chosen, rejected = (pairs.policy.side(side).sums() - pairs.reference.side(side).sums() for side in range(2))
    return chosen - rejected


def gradients(losses: Tensor, pairs: ObjectiveInputs) -> list[Tensor]:
    return list(torch.autograd.grad(losses.sum(), [side.values for side in pairs.policy.sides], retain_graph=True))


@pytest.mark.parametrize("name", SCORED_LOSSES)
def test_values_and_gradients_are_the_divergence_from_the_margin_column(name):
    pairs = replace(random_pairs(), margin=MARGINS)
    found = objective_of(name, {"beta": BETA, "reward_scale": SCALE})(pairs).per_pair
    value = expected(name, log_ratio_margin(pairs), MARGINS)
    torch.testing.assert_close(found, value, atol=1e-12, rtol=0)
    for one, other in zip(gradients(found, pairs), gradients(value, pairs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", SCORED_LOSSES)
def test_the_comparisons_of_a_list_are_fitted_to_its_scores(name):
    pairs, third = random_pairs(), random_pairs(seed=1)
    values = torch.tensor([[3.0, 1.0, 0.0]]).repeat(pairs.num_pairs, 1)
    lists = ObjectiveInputs(
        ExampleLogps.of(*pairs.policy.sides, third.policy.chosen),
        ExampleLogps.of(*pairs.reference.sides, third.reference.chosen),
        values=values,
    )
    found = objective_of(name, {"beta": BETA, "reward_scale": SCALE})(lists).per_pair
    ratios = [
        policy.sums() - reference.sums()
        for policy, reference in zip(lists.policy.sides, lists.reference.sides, strict=True)
    ]
    comparisons = [
        expected(name, ratios[better] - ratios[worse], values[:, better] - values[:, worse])
        for better, worse in ((0, 1), (0, 2), (1, 2))
    ]
    torch.testing.assert_close(found, torch.stack(comparisons).mean(0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", SCORED_LOSSES)
def test_a_policy_that_has_the_margins_of_the_scores_has_no_loss(name):
    pairs = random_pairs()
    fitted = replace(pairs, margin=(BETA / SCALE * log_ratio_margin(pairs)).detach())
    found = objective_of(name, {"beta": BETA, "reward_scale": SCALE})(fitted).per_pair
    torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-9, rtol=0)
