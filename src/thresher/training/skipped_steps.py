"""Skipped steps: the reason, the pairs to check, and the log `skipped_steps.jsonl` beside the metrics.

One JSON object per step; the file exists only if a step was skipped. A resume from step k keeps the records up to k, as
in the metric log.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thresher import durable
from thresher.data.batching.plan import PairIds
from thresher.data.store.arrow_schema import hash_pair
from thresher.data.store.reader import PairStore
from thresher.observability.trackers.jsonl import truncate_after
from thresher.observability.trackers.tracker import rotate, translate_os_errors
from thresher.strategies.nonfinite import NonFiniteStep
from thresher.training.state import TrainerState

FILE_NAME = "skipped_steps.jsonl"


@dataclass(frozen=True)
class NonFinitePair:
    """A pair by its number in the store and its content hash; source is its first non-finite value, if known."""

    number: int
    content_hash: str
    source: str | None


@dataclass(frozen=True)
class SkippedStep:
    """Why a step was skipped, and the pairs responsible: all pairs of the step if no single one is.

    consecutive: skipped steps up to and including this one. ends_run: there are too many of them.
    """

    reason: str
    grad_norm: float
    pairs: tuple[NonFinitePair, ...]
    consecutive: int
    ends_run: bool


def describe_skipped(
    nonfinite: NonFiniteStep, state: TrainerState, store: PairStore, pair_ids: PairIds, max_consecutive: int
) -> SkippedStep:
    """Describe a step that state has already recorded; pair_ids are all pairs of the step."""
    read = store.read(np.array(sorted(nonfinite.pairs), dtype=np.int64) if nonfinite.pairs else pair_ids)
    pairs = tuple(
        NonFinitePair(number, hash_pair(pair).pair.hex(), nonfinite.pairs.get(number))
        for number, pair in zip(read.pair_ids.tolist(), read.pairs, strict=True)
    )
    consecutive = state.skipped_in_a_row
    return SkippedStep(nonfinite.reason, state.grad_norm, pairs, consecutive, ends_run=consecutive >= max_consecutive)


class SkippedStepLog:
    """Writes skipped steps to `skipped_steps.jsonl` in the log directory of the run."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        """Start a new log, or continue after `resume_step`; the file of an earlier run is renamed, not overwritten."""
        self.path = run_dir / FILE_NAME
        with translate_os_errors():
            if resume_step is None:
                rotate(self.path)
            elif self.path.exists():
                truncate_after(self.path, resume_step)

    def write(self, step: int, skipped: SkippedStep) -> None:
        """Append one line and sync it to disk, because a run that skips steps may end soon."""
        record = {
            "step": step,
            "reason": skipped.reason,
            "grad_norm": skipped.grad_norm if math.isfinite(skipped.grad_norm) else repr(skipped.grad_norm),
            "in_a_row": skipped.consecutive,
            "pairs": [
                {"pair": pair.number, "hash": pair.content_hash, "fault": pair.source or "not known"}
                for pair in skipped.pairs
            ],
        }
        with translate_os_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                durable.sync_stream(file)
