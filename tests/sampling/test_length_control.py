"""The win rate at equal lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from thresher.sampling.answers import Answer, SampledPrompt
from thresher.sampling.judges import Verdict, length_controlled_metrics, wilson_interval

NAME = "samples/win_rate_length_controlled"


def measure(differences: Sequence[int], outcomes: Sequence[float]) -> tuple[float, float, float]:
    """Rate and interval of answers that are longer than the reference's by these numbers of characters."""
    samples = [
        SampledPrompt("p", Answer("x" * (100 + each), (5, 2), True), Answer("y" * 100, (6, 2), True), 0.0)
        for each in differences
    ]
    metrics = length_controlled_metrics(samples, [Verdict(each) for each in outcomes])
    return metrics[NAME], metrics[f"{NAME}_low"], metrics[f"{NAME}_high"]


def test_answers_that_win_only_by_their_length_win_half_of_the_time() -> None:
    # longer ones win 8 of 10, shorter ones 2 of 10: logit(0.8) + logit(0.2) = 0, whatever phi is
    rate, low, high = measure([30] * 10 + [-30] * 10, [1.0] * 8 + [0.0] * 2 + [1.0] * 2 + [0.0] * 8)
    assert rate == pytest.approx(0.5, abs=1e-9)
    assert low == pytest.approx(1 - high)
    assert low < 0.5


def test_two_lengths_have_the_value_derived_by_hand() -> None:
    # three of four answers are longer and win 90 %, the others are shorter and win 40 %. With tanh(d / std) = +-t for
    # both, theta + phi t = logit(0.9) and theta - phi t = logit(0.4). The prior vanishes among 40,000 verdicts
    differences, outcomes = [50] * 30_000 + [-50] * 10_000, [0.9] * 30_000 + [0.4] * 10_000
    theta = (math.log(0.9 / 0.1) + math.log(0.4 / 0.6)) / 2
    assert measure(differences, outcomes)[0] == pytest.approx(1 / (1 + math.exp(-theta)), abs=1e-4)
    assert np.mean(outcomes) == pytest.approx(0.775)  # the win rate is higher than that, 0.710


def test_the_fit_minimizes_the_cross_entropy_with_its_prior() -> None:
    draw = np.random.default_rng(0)
    differences, outcomes = draw.integers(-90, 90, 64), draw.choice([0.0, 0.5, 1.0, 0.7], 64)
    effect = torch.tanh(torch.tensor(differences / differences.std(ddof=1)))
    weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        fit = torch.nn.functional.binary_cross_entropy_with_logits
        loss = fit(weights[0] + weights[1] * effect, torch.tensor(outcomes), reduction="sum")
        loss = loss + fit(weights[1], torch.tensor(0.5, dtype=torch.float64))
        loss.backward()
        return loss

    optimizer.step(closure)
    assert measure(differences, outcomes)[0] == pytest.approx(float(weights[0].detach().sigmoid()), abs=1e-7)


@pytest.mark.parametrize("difference", [0, 25])
def test_without_a_difference_between_lengths_it_is_the_win_rate(difference: int) -> None:
    rate, low, high = measure([difference] * 10, [1.0] * 7 + [0.5] + [0.0] * 2)
    assert rate == pytest.approx(0.75, abs=1e-9)
    assert 0.0 < low < 0.75 < high < 1.0


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_if_every_verdict_is_a_win_it_is_the_win_rate_with_its_interval(outcome: float) -> None:
    assert measure([1, 5, -70], [outcome] * 3) == (outcome, *wilson_interval([outcome] * 3))
    assert measure([12], [outcome]) == (outcome, *wilson_interval([outcome]))


def test_a_longer_answer_that_always_wins_leaves_the_rate_finite_and_its_interval_wide() -> None:
    rate, low, high = measure([10, 20, 90, -10, -20, -90], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    assert rate == pytest.approx(0.5, abs=1e-9)
    assert low < 0.2
    assert high > 0.8


def test_the_reference_has_the_other_part_of_the_rate() -> None:
    differences, outcomes = [4, 80, -35, 0, 60, 7], [1.0, 0.0, 1.0, 0.5, 1.0, 0.3]
    rate, low, high = measure(differences, outcomes)
    mirrored = measure([-each for each in differences], [1.0 - each for each in outcomes])
    assert mirrored == pytest.approx((1.0 - rate, 1.0 - high, 1.0 - low))


def test_the_interval_contains_the_rate_of_the_model_95_times_in_100() -> None:
    draw, theta, hits = np.random.default_rng(0), 0.4, 0
    for _ in range(400):
        differences = draw.normal(30.0, 40.0, 100).astype(int).clip(-99)
        chances = 1 / (1 + np.exp(-theta - 0.8 * np.tanh(differences / differences.std(ddof=1))))
        _, low, high = measure(differences, (draw.random(100) < chances).astype(float))
        hits += low < 1 / (1 + math.exp(-theta)) < high
    assert 0.92 < hits / 400 < 0.98  # the standard error of the share is 0.011
