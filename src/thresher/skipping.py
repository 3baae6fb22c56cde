"""What is told of a step that was skipped: its reason, and the pairs to look at."""

from __future__ import annotations

import numpy as np

from thresher.data.pair_columns import hash_pair
from thresher.data.plan import PairIds
from thresher.data.store import PairStore
from thresher.observe.skipped import SkippedStep, SpoiltPair
from thresher.strategies.faults import StepFault
from thresher.trainer_state import TrainerState


def describe_skipped(
    fault: StepFault, state: TrainerState, store: PairStore, pair_ids: PairIds, max_in_a_row: int
) -> SkippedStep:
    """Name the pairs that spoilt the step, or all of them (pair_ids) where none stands out; state has counted it."""
    read = store.read(np.array(sorted(fault.pairs), dtype=np.int64) if fault.pairs else pair_ids)
    pairs = tuple(
        SpoiltPair(number, hash_pair(pair).pair.hex(), fault.pairs.get(number))
        for number, pair in zip(read.pair_ids.tolist(), read.pairs, strict=True)
    )
    in_a_row = state.skipped_in_a_row
    return SkippedStep(fault.reason, state.grad_norm, pairs, in_a_row, ends_run=in_a_row >= max_in_a_row)
