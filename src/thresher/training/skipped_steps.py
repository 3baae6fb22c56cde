"""Skipped steps: the reason, the pairs to check, and the log `skipped_steps.jsonl` beside the metrics.

One JSON object per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thresher.data.batching.plan import PairIds
from thresher.data.store.arrow_schema import hash_pair
from thresher.data.store.reader import PairStore
from thresher.observability.log_files import SKIPPED_STEPS
from thresher.observability.trackers.jsonl import StepLog
from thresher.strategies.nonfinite import NonFiniteStep
from thresher.training.state import TrainerState


@dataclass(frozen=True)
class NonFinitePair:
    """A pair by its number in the store and its content hash; source is its first non-finite value, if known."""

    number: int
    content_hash: str
    source: str | None


@dataclass(frozen=True)
class SkippedStep:
    """Why a step was skipped, and the pairs responsible: all pairs of the step if no single one is.

    An overflow of fp16 has no pairs and is no failure. consecutive: failed steps up to and including this one.
    ends_run: there are too many of them. loss_scale: of the next step, in fp16.
    """

    reason: str
    grad_norm: float
    pairs: tuple[NonFinitePair, ...]
    consecutive: int
    ends_run: bool
    loss_scale: float | None = None


def describe_skipped(
    nonfinite: NonFiniteStep, state: TrainerState, store: PairStore, pair_ids: PairIds, max_consecutive: int
) -> SkippedStep:
    """Describe a step that state has already recorded; pair_ids are all pairs of the step."""
    consecutive, scale = state.skipped_in_a_row, nonfinite.loss_scale
    if not nonfinite.is_failure:
        return SkippedStep(nonfinite.reason, state.grad_norm, (), consecutive, ends_run=False, loss_scale=scale)
    read = store.read(np.array(sorted(nonfinite.pairs), dtype=np.int64) if nonfinite.pairs else pair_ids)
    pairs = tuple(
        NonFinitePair(store.number_in_files(number), hash_pair(pair).pair.hex(), nonfinite.pairs.get(number))
        for number, pair in zip(read.pair_ids.tolist(), read.pairs, strict=True)
    )
    ends_run = consecutive >= max_consecutive
    return SkippedStep(nonfinite.reason, state.grad_norm, pairs, consecutive, ends_run, scale)


class SkippedStepLog:
    """Writes skipped steps to `skipped_steps.jsonl` in the log directory of the run."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        self._log = StepLog(run_dir / SKIPPED_STEPS, resume_step)

    @property
    def path(self) -> Path:
        return self._log.path

    def write(self, step: int, skipped: SkippedStep) -> None:
        """Append one line."""
        record = {
            "step": step,
            "reason": skipped.reason,
            "grad_norm": skipped.grad_norm if math.isfinite(skipped.grad_norm) else repr(skipped.grad_norm),
            "in_a_row": skipped.consecutive,
            **({} if skipped.loss_scale is None else {"loss_scale": skipped.loss_scale}),
            "pairs": [
                {"pair": pair.number, "hash": pair.content_hash, "fault": pair.source or "not known"}
                for pair in skipped.pairs
            ],
        }
        self._log.write(record)
