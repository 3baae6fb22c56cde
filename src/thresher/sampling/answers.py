"""Answers to the fixed prompts: what they measure without a judge (length, ending, repetition, KL), and their log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.observability.log_files import SAMPLES
from thresher.observability.trackers.jsonl import StepLog, encode_number
from thresher.observability.trackers.tracker import Table
from thresher.sampling.judges import Judge, JudgeError, Verdict, win_rate_metrics

logger = logging.getLogger(__name__)

# tokens of a phrase: shorter ones recur in any text
NGRAM = 4


@dataclass(frozen=True)
class Answer:
    """A generated answer."""

    text: str
    token_ids: tuple[int, ...]  # with the token that ends it, unless it was cut at max_new_tokens
    ended: bool

    @property
    def words(self) -> tuple[int, ...]:
        """The tokens without the one that ends the answer."""
        return self.token_ids[:-1] if self.ended else self.token_ids

    @property
    def repetition(self) -> float:
        """Share of its n-grams that occur earlier in it; 0 if it is shorter than an n-gram."""
        grams = _ngrams(self.words, NGRAM)
        return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


@dataclass(frozen=True)
class SampledPrompt:
    """A prompt and both answers."""

    prompt: str
    policy: Answer
    reference: Answer
    log_ratio: float  # log of policy over reference on the policy's answer, summed over tokens


@dataclass(frozen=True)
class SampledAnswers:
    """The answers of one evaluation, in the order of the prompts."""

    prompts: tuple[SampledPrompt, ...]
    draws_from_policy: bool = True  # at temperature 1

    def metrics(self) -> dict[str, float]:
        """Means over the prompts, and the diversity of each side over all of its answers.

        The mean log ratio estimates KL(policy || reference) of a whole answer if answers are drawn from the policy.
        """
        sides = {
            "policy": [each.policy for each in self.prompts],
            "reference": [each.reference for each in self.prompts],
        }
        ratio = "samples/kl" if self.draws_from_policy else "samples/log_ratio"
        metrics = {ratio: _mean([each.log_ratio for each in self.prompts])}
        for side, answers in sides.items():
            metrics |= {
                f"samples/lengths/{side}": _mean([len(each.token_ids) for each in answers]),
                f"samples/ended/{side}": _mean([each.ended for each in answers]),
                f"samples/repetition/{side}": _mean([each.repetition for each in answers]),
                f"samples/distinct/{side}": distinct_share(answers),
            }
        return metrics


def distinct_share(answers: Sequence[Answer], n: int = 2) -> float:
    """Share of distinct n-grams among all answers (distinct-n, 1510.03055); 1 if there are none."""
    grams = [gram for each in answers for gram in _ngrams(each.words, n)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _ngrams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


TABLE_NAME = "samples/answers"


@dataclass(frozen=True)
class JudgedAnswers:
    """Answers with a verdict per prompt; none without a judge, or if it failed."""

    answers: SampledAnswers
    verdicts: Sequence[Verdict]

    @property
    def metrics(self) -> dict[str, float]:
        return self.answers.metrics() | (win_rate_metrics(self.verdicts) if self.verdicts else {})

    def rows(self) -> list[dict[str, Any]]:
        """One row per prompt. Values of one answer are named for it, as in policy_tokens."""
        verdicts: Sequence[Verdict | None] = self.verdicts or [None] * len(self.answers.prompts)
        return [_row(each, verdict) for each, verdict in zip(self.answers.prompts, verdicts, strict=True)]


def judge_answers(judge: Judge | None, answers: SampledAnswers, step: int) -> JudgedAnswers:
    """Ask the judge; one that fails is reported, and the run continues without a win rate."""
    if judge is None:
        return JudgedAnswers(answers, ())
    try:
        return JudgedAnswers(answers, judge.verdicts(answers.prompts))
    except JudgeError as error:
        logger.warning("no win rate after step %d: %s", step, error)
        return JudgedAnswers(answers, ())


class SampleLog:
    """Judges the answers of evaluations, writes them to `samples.jsonl` and sends them to the trackers as a table."""

    def __init__(
        self, run_dir: Path, resume_step: int | None, judge: Judge | None, log_table: Callable[[int, Table], None]
    ) -> None:
        self._log, self._judge, self._log_table = StepLog(run_dir / SAMPLES, resume_step), judge, log_table

    def write(self, step: int, answers: SampledAnswers) -> dict[str, float]:
        """Log the answers of a step; return the metrics."""
        judged = judge_answers(self._judge, answers, step)
        rows = judged.rows()
        for row in rows:
            self._log.write({"step": step, **row})
        columns = ["step", *rows[0]]
        self._log_table(step, Table(TABLE_NAME, columns, [[step, *row.values()] for row in rows]))
        return judged.metrics


def _row(sample: SampledPrompt, verdict: Verdict | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": sample.prompt,
        "policy": sample.policy.text,
        "reference": sample.reference.text,
        **_numbers("policy", sample.policy),
        **_numbers("reference", sample.reference),
        "log_ratio": encode_number(sample.log_ratio),
    }
    if verdict is not None:
        row["win"] = verdict.outcome
        if verdict.rewards is not None:
            row["policy_reward"], row["reference_reward"] = verdict.rewards
        else:
            row["inconsistent"] = verdict.is_inconsistent
    return row


def _numbers(side: str, answer: Answer) -> dict[str, Any]:
    return {
        f"{side}_tokens": len(answer.token_ids),
        f"{side}_ended": answer.ended,
        f"{side}_repetition": round(answer.repetition, 4),
    }
