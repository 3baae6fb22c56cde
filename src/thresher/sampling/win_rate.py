"""The win rate of a policy against its reference, from the outcome of each prompt, with a confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# of the standard normal distribution: an interval of 95 %
_Z = 1.959963984540054


@dataclass(frozen=True)
class Verdict:
    """A judge's result for one prompt. outcome: 1 if the policy won, 0 if it lost, 0.5 for a tie.

    is_inconsistent: the judge preferred the same position, not the same answer, when the order was swapped.
    rewards: of policy and reference, if the judge scores answers.
    """

    outcome: float
    is_inconsistent: bool = False
    rewards: tuple[float, float] | None = None


TIE = Verdict(0.5)


def from_scores(policy: float, reference: float) -> Verdict:
    """The higher score wins."""
    return Verdict(0.5 + 0.5 * ((policy > reference) - (policy < reference)), rewards=(policy, reference))


def from_both_orders(policy_first: float, reference_first: float) -> Verdict:
    """Join two comparisons, each the probability that the first answer is better.

    The outcome is the mean of both; a judge that prefers a position, whatever the answers, calls a tie.
    """
    wins = (policy_first, 1.0 - reference_first)
    is_inconsistent = min(wins) < 0.5 < max(wins)
    return Verdict(0.5 * (wins[0] + wins[1]), is_inconsistent)


def wilson_interval(outcomes: Sequence[float]) -> tuple[float, float]:
    """Wilson's score interval of a mean of outcomes between 0 and 1, one per prompt.

    The variance of such outcomes is at most that of a coin with the same mean, so that ties make the interval wider
    than necessary, not narrower. Unlike the normal interval, it has a width at 0 and 1.
    """
    n, mean = len(outcomes), sum(outcomes) / len(outcomes)
    scale = 1.0 + _Z**2 / n
    center = (mean + _Z**2 / (2 * n)) / scale
    half = _Z / scale * math.sqrt(mean * (1.0 - mean) / n + _Z**2 / (4 * n**2))
    return max(0.0, center - half), min(1.0, center + half)


def win_rate_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Win rate with its interval, the share of inconsistent verdicts, and the mean rewards of a judge that scores."""
    outcomes = [each.outcome for each in verdicts]
    low, high = wilson_interval(outcomes)
    metrics = {
        "samples/win_rate": sum(outcomes) / len(outcomes),
        "samples/win_rate_low": low,
        "samples/win_rate_high": high,
    }
    rewards = [each.rewards for each in verdicts if each.rewards is not None]
    if rewards:
        metrics["samples/reward"] = sum(policy for policy, _ in rewards) / len(rewards)
        metrics["samples/reward_reference"] = sum(reference for _, reference in rewards) / len(rewards)
    else:
        metrics["samples/inconsistent"] = sum(each.is_inconsistent for each in verdicts) / len(verdicts)
    return metrics
