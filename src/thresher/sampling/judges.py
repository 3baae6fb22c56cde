"""Judges decide which of two answers is better: a Python function, or a model behind an endpoint (endpoint.py).

A function with two parameters, `score(prompt, answer)`, returns a reward: the answer with the higher one wins. One with
three, `compare(prompt, first, second)`, returns the probability that the first answer is better, or a bool; it is
called in both orders, because judges prefer positions. Their verdicts add up to the policy's win rate against its
reference, with a confidence interval.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from thresher.errors import UserError
from thresher.imported_function import import_function
from thresher.sampling.answers import SampledPrompt

# of the standard normal distribution: an interval of 95 %
_Z = 1.959963984540054


@dataclass(frozen=True)
class Verdict:
    """A judge's result for one prompt."""

    outcome: float  # 1 if the policy won, 0 if it lost, 0.5 for a tie
    is_inconsistent: bool = False  # it preferred the same position, not the same answer, when the order was swapped
    rewards: tuple[float, float] | None = None  # of policy and reference, if the judge scores answers


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

    A coin with the same mean has at least the variance of such outcomes, so ties make the interval wider than
    necessary, not narrower. Unlike the normal interval, it has a width at 0 and 1.
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


class JudgeError(Exception):
    """A judge that could not decide: the run continues without a win rate."""


class Judge(Protocol):
    """Decides on all prompts of an evaluation; raises JudgeError if it cannot."""

    def verdicts(self, samples: Sequence[SampledPrompt]) -> list[Verdict]: ...


def compare_answers(
    samples: Sequence[SampledPrompt],
    compare: Callable[[str, str, str], float],
    call: Callable[..., Iterable[float]] = map,
) -> list[Verdict]:
    """Compare answers in both orders; equal ones are a tie. `call` is map, or the same in parallel."""
    orders = [
        (s.prompt, first.text, second.text)
        for s in samples
        if s.policy.text != s.reference.text
        for first, second in ((s.policy, s.reference), (s.reference, s.policy))
    ]
    replies = iter(call(lambda order: compare(*order), orders))
    return [
        TIE if s.policy.text == s.reference.text else from_both_orders(next(replies), next(replies)) for s in samples
    ]


@dataclass(frozen=True)
class FunctionJudge:
    """The user's function: `score(prompt, answer)`, or `compare(prompt, first, second)`."""

    name: str
    function: Callable[..., Any]
    compares: bool

    def verdicts(self, samples: Sequence[SampledPrompt]) -> list[Verdict]:
        if self.compares:
            return compare_answers(samples, self._compare)
        return [from_scores(*(self._score(s.prompt, each.text) for each in (s.policy, s.reference))) for s in samples]

    def _score(self, prompt: str, answer: str) -> float:
        value = self._call(prompt, answer)
        if not math.isfinite(value):
            raise JudgeError(f"{self.name} returned {value}, which no other score can be compared with")
        return value

    def _compare(self, prompt: str, first: str, second: str) -> float:
        value = self._call(prompt, first, second)
        if not 0.0 <= value <= 1.0:
            raise JudgeError(f"{self.name} returned {value}; a comparison is a probability from 0 to 1")
        return value

    def _call(self, *texts: str) -> float:
        try:
            value = self.function(*texts)
        except Exception as error:  # the user's function may raise anything
            raise JudgeError(f"{self.name} raised {type(error).__name__}: {error}") from error
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise JudgeError(f"{self.name} returned {value!r} instead of a number") from error


def load_judge(location: str) -> FunctionJudge:
    """Import the judge at `package.module:function` or `path/to/file.py:function`."""
    function = import_function(location, "samples.judge")
    required = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) not in (2, 3):
        raise UserError(
            f"samples.judge: {location} has {len(required)} parameters without a default; write score(prompt, answer) "
            "or compare(prompt, first, second)"
        )
    return FunctionJudge(location, function, compares=len(required) == 3)
