"""Judges: what decides which of two answers is better. A Python function, or a model behind an endpoint (endpoint.py).

A function with two parameters, `score(prompt, answer)`, returns a reward: the answer with the higher one wins. One with
three, `compare(prompt, first, second)`, returns the probability that the first answer is better, or a bool; it is
called in both orders, because judges prefer positions.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from thresher.errors import UserError
from thresher.imported_function import import_function
from thresher.sampling.answers import SampledPrompt
from thresher.sampling.win_rate import TIE, Verdict, from_both_orders, from_scores


class JudgeError(Exception):
    """A judge that could not decide: the run continues without a win rate."""


class Judge(Protocol):
    """Decides on all prompts of an evaluation; raises JudgeError if it cannot."""

    def verdicts(self, samples: Sequence[SampledPrompt]) -> list[Verdict]: ...


@dataclass(frozen=True)
class ScoringJudge:
    """A reward of single answers, `score(prompt, answer)`."""

    name: str
    score: Callable[[str, str], float]

    def verdicts(self, samples: Sequence[SampledPrompt]) -> list[Verdict]:
        return [
            from_scores(self._call(s.prompt, s.policy.text), self._call(s.prompt, s.reference.text)) for s in samples
        ]

    def _call(self, prompt: str, answer: str) -> float:
        value = _number(self.name, _call(self.name, self.score, prompt, answer))
        if not math.isfinite(value):
            raise JudgeError(f"{self.name} returned {value}, which no other score can be compared with")
        return value


@dataclass(frozen=True)
class ComparingJudge:
    """A preference between two answers, `compare(prompt, first, second)`, asked in both orders."""

    name: str
    compare: Callable[[str, str, str], float]

    def verdicts(self, samples: Sequence[SampledPrompt]) -> list[Verdict]:
        return [
            TIE
            if s.policy.text == s.reference.text
            else from_both_orders(
                self._call(s.prompt, s.policy.text, s.reference.text),
                self._call(s.prompt, s.reference.text, s.policy.text),
            )
            for s in samples
        ]

    def _call(self, prompt: str, first: str, second: str) -> float:
        value = _number(self.name, _call(self.name, self.compare, prompt, first, second))
        if not 0.0 <= value <= 1.0:
            raise JudgeError(f"{self.name} returned {value}; a comparison is a probability from 0 to 1")
        return value


def load_judge(location: str) -> Judge:
    """Import the judge at `package.module:function` or `path/to/file.py:function`."""
    return _judge_of(location, import_function(location, "samples.judge"))


def _judge_of(location: str, function: Callable[..., Any]) -> Judge:
    """Tell the kinds of judges apart by the number of parameters without a default."""
    required = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 2:
        return ScoringJudge(location, function)
    if len(required) == 3:
        return ComparingJudge(location, function)
    raise UserError(
        f"samples.judge: {location} has {len(required)} parameters without a default; write score(prompt, answer) or "
        "compare(prompt, first, second)"
    )


def _call(name: str, function: Callable[..., Any], *texts: str) -> Any:
    try:
        return function(*texts)
    except Exception as error:  # the user's function may raise anything
        raise JudgeError(f"{name} raised {type(error).__name__}: {error}") from error


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise JudgeError(f"{name} returned {value!r} instead of a number") from error
