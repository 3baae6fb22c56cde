"""Steps that were skipped: the reason, the pairs to look at, and the record `skipped_steps.jsonl` beside the metrics.

One JSON object a step; there is no file where no step was skipped. After a resume from step k it holds the steps up to
k, as the metric log does.
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
    """A pair by its number in the store and the hash of its content; fault says what of it is not finite, if known."""

    number: int
    content_hash: str
    fault: str | None


@dataclass(frozen=True)
class SkippedStep:
    """Why a step was skipped and for which pairs: all of the step where no single one can be blamed.

    in_a_row counts the steps skipped up to this one without one between that was made; ends_run says that they are
    too many.
    """

    reason: str
    grad_norm: float
    pairs: tuple[NonFinitePair, ...]
    in_a_row: int
    ends_run: bool


def describe_skipped(
    fault: NonFiniteStep, state: TrainerState, store: PairStore, pair_ids: PairIds, max_in_a_row: int
) -> SkippedStep:
    """Name the pairs that spoilt the step, or all of them (pair_ids) where none stands out; state has counted it."""
    read = store.read(np.array(sorted(fault.pairs), dtype=np.int64) if fault.pairs else pair_ids)
    pairs = tuple(
        NonFinitePair(number, hash_pair(pair).pair.hex(), fault.pairs.get(number))
        for number, pair in zip(read.pair_ids.tolist(), read.pairs, strict=True)
    )
    in_a_row = state.skipped_in_a_row
    return SkippedStep(fault.reason, state.grad_norm, pairs, in_a_row, ends_run=in_a_row >= max_in_a_row)


class SkippedStepLog:
    """Write skipped steps to a file of the run's log directory."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        """Begin, or go on after `resume_step`; what an earlier, separate run left is renamed, never overwritten."""
        self.path = run_dir / FILE_NAME
        with translate_os_errors():
            if resume_step is None:
                rotate(self.path)
            elif self.path.exists():
                truncate_after(self.path, resume_step)

    def write(self, step: int, skipped: SkippedStep) -> None:
        """Append one line; it is on the disk when this returns, because a run that skips steps may end soon."""
        record = {
            "step": step,
            "reason": skipped.reason,
            "grad_norm": skipped.grad_norm if math.isfinite(skipped.grad_norm) else repr(skipped.grad_norm),
            "in_a_row": skipped.in_a_row,
            "pairs": [
                {"pair": pair.number, "hash": pair.content_hash, "fault": pair.fault or "not known"}
                for pair in skipped.pairs
            ],
        }
        with translate_os_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
                durable.sync_stream(file)
