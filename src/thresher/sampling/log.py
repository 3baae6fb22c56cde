"""The log of an evaluation's answers: verdicts, metrics, rows and tables, on the process that leads the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.observability.log_files import SAMPLES
from thresher.observability.trackers.jsonl import StepLog, encode_number
from thresher.observability.trackers.tracker import Table
from thresher.sampling.answers import SampledAnswers, SampledPrompt
from thresher.sampling.judges import Judge, JudgeError, Verdict, win_rate_metrics

logger = logging.getLogger(__name__)

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
    verdicts: Sequence[Verdict] = ()
    try:
        verdicts = judge.verdicts(answers.prompts) if judge is not None else ()
    except JudgeError as error:
        logger.warning("no win rate after step %d: %s", step, error)
    return JudgedAnswers(answers, verdicts)


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
    }
    for side, answer in (("policy", sample.policy), ("reference", sample.reference)):
        row[f"{side}_tokens"] = len(answer.token_ids)
        row[f"{side}_ended"] = answer.ended
        row[f"{side}_repetition"] = round(answer.repetition, 4)
    row["log_ratio"] = encode_number(sample.log_ratio)
    if verdict is not None:
        row["win"] = verdict.outcome
        if verdict.rewards is not None:
            row["policy_reward"], row["reference_reward"] = verdict.rewards
        else:
            row["inconsistent"] = verdict.is_inconsistent
    return row
