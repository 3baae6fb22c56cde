"""Values of single pairs at each evaluation: rewards, logps and lengths, in `eval_pairs.jsonl` beside the metrics.

A mean does not show whether a few pairs or all of them moved. One JSON object per evaluation, one list per value. Large
validation sets are sampled at regular intervals, the same pairs at each evaluation, so that a record stays small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thresher.data.batching.plan import PairIds
from thresher.data.store.reader import PairStore
from thresher.distributed.groups import DataParallelGroup
from thresher.losses.objective import Objective
from thresher.losses.pairs import ObjectiveInputs
from thresher.observability.log_files import EVAL_PAIRS
from thresher.observability.trackers.jsonl import StepLog, encode_number

MAX_PAIRS = 512
_DIGITS = 7  # of an fp32 number


@dataclass(frozen=True)
class EvaluatedPairs:
    """Pairs by their number in the store, and their values by name: one list per value, in the order of `numbers`."""

    numbers: list[int]
    values: Mapping[str, list[float]]


class PairSampler:
    """Collects the values of every n-th pair on each rank, at most MAX_PAIRS over all ranks."""

    def __init__(self, objective: Objective, store: PairStore, max_pairs: int = MAX_PAIRS):
        self._objective = objective
        self._store = store
        self._interval = -(-len(store) // max_pairs)
        self._parts: list[tuple[PairIds, dict[str, Tensor]]] = []

    def add(self, pair_ids: PairIds, inputs: ObjectiveInputs) -> None:
        """Keep the sampled pairs of a micro-batch."""
        kept = np.flatnonzero(pair_ids % self._interval == 0)
        if len(kept):
            index = torch.from_numpy(kept)
            columns = _columns(self._objective, inputs)
            self._parts.append((pair_ids[kept], {name: each.cpu()[index] for name, each in columns.items()}))

    def gather(self, dp_group: DataParallelGroup) -> EvaluatedPairs | None:
        """Return the pairs of all ranks on rank 0, in the order of the store; None on the other ranks."""
        by_rank = dp_group.gather_object(self._parts)
        if by_rank is None:
            return None
        parts = [part for parts in by_rank for part in parts]
        if not parts:
            return None
        ids = np.concatenate([ids for ids, _ in parts])
        order = np.argsort(ids)
        values = {name: torch.cat([columns[name] for _, columns in parts])[order].tolist() for name in parts[0][1]}
        return EvaluatedPairs([self._store.number_in_files(number) for number in ids[order].tolist()], values)


def _columns(objective: Objective, inputs: ObjectiveInputs) -> dict[str, Tensor]:
    rewards, policy, reference = objective.rewards(inputs), inputs.policy, inputs.reference
    return {
        "rewards/chosen": rewards.chosen,
        "rewards/rejected": rewards.rejected,
        "logps/chosen": policy.chosen.sums(),
        "logps/rejected": policy.rejected.sums(),
        "lengths/chosen": policy.chosen.lengths,
        "lengths/rejected": policy.rejected.lengths,
        **(
            {}
            if reference is None
            else {
                "reference_logps/chosen": reference.chosen.sums(),
                "reference_logps/rejected": reference.rejected.sums(),
            }
        ),
    }


class EvaluatedPairsLog:
    """Writes the pairs of evaluations to `eval_pairs.jsonl` in the log directory of the run."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        self._log = StepLog(run_dir / EVAL_PAIRS, resume_step)

    def write(self, step: int, pairs: EvaluatedPairs) -> None:
        """Append one line."""
        values = {name: [encode_number(_rounded(value)) for value in column] for name, column in pairs.values.items()}
        self._log.write({"step": step, "pairs": pairs.numbers, **values})


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
