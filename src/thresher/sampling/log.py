"""The log of an evaluation's answers: verdicts, metrics, rows and tables, on the process that leads the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thresher.observability.log_files import SAMPLES
from thresher.observability.trackers.jsonl import StepLog, encode_number
from thresher.observability.trackers.tracker import Table
from thresher.sampling.answers import SampledAnswers, SampledPrompt
from thresher.sampling.judges import Judge, JudgeError, Verdict, win_rate_metrics

logger = logging.getLogger(__name__)

TABLE_NAME = "samples/answers"


def judge_answers(
    judge: Judge | None, answers: SampledAnswers, step: int
) -> tuple[dict[str, float], Sequence[Verdict | None]]:
    """Return the metrics, and a verdict per prompt. A judge that fails is reported, and there is no win rate."""
    metrics, verdicts = answers.metrics(), [None] * len(answers.prompts)
    if judge is None:
        return metrics, verdicts
    try:
        judged = judge.verdicts(answers.prompts)
    except JudgeError as error:
        logger.warning("no win rate after step %d: %s", step, error)
        return metrics, verdicts
    return metrics | win_rate_metrics(judged), judged


class SampleLog:
    """Judges the answers of evaluations, writes them to `samples.jsonl` and sends them to the trackers as a table."""

    def __init__(
        self, run_dir: Path, resume_step: int | None, judge: Judge | None, log_table: Callable[[int, Table], None]
    ) -> None:
        self._log, self._judge, self._log_table = StepLog(run_dir / SAMPLES, resume_step), judge, log_table

    def write(self, step: int, answers: SampledAnswers) -> dict[str, float]:
        """Log the answers of a step; return the metrics."""
        metrics, verdicts = judge_answers(self._judge, answers, step)
        rows = [_row(*each) for each in zip(answers.prompts, verdicts, strict=True)]
        for row in rows:
            self._log.write({"step": step, **row})
        columns = ["step", *rows[0]]
        self._log_table(step, Table(TABLE_NAME, columns, [[step, *row.values()] for row in rows]))
        return metrics


def _row(sample: SampledPrompt, verdict: Verdict | None) -> dict[str, Any]:
    """The row of a prompt. Values of one answer are named for it, as in policy_tokens."""
    row: dict[str, Any] = {"prompt": sample.prompt, "policy": sample.policy.text, "reference": sample.reference.text}
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
