"""Sequential micro-batch executor: one forward and one backward after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thresher.data.pair import Pair, PairBatch
from thresher.losses.pairs import ChosenRejectedLogps, ResponseLogps
from thresher.models.layouts import Layout, ModelInputs
from thresher.models.logps import PairModel
from thresher.strategies.accumulate import LossFn
from thresher.strategies.strategy import TokenCounts

_IDS = np.zeros(2, dtype=np.int32)
# scored in place of a batch without pairs: FSDP ranks must run the same number of forwards
DUMMY_BATCH = PairBatch(np.zeros(1, dtype=np.int64), (Pair(_IDS, _IDS, _IDS),))


@dataclass(frozen=True)
class SequentialExecutor:
    """Scores micro-batches in turn; the output of a dummy batch is discarded."""

    model: PairModel
    layout: Layout

    def score(self, batch: PairBatch, *, with_squared_probs: bool = False) -> ChosenRejectedLogps:
        return self._score(batch, with_squared_probs)[0]

    def backward(self, batches: Sequence[PairBatch], loss_fn: LossFn, *, with_squared_probs: bool) -> TokenCounts:
        tokens = TokenCounts()
        for index, batch in enumerate(batches):
            policy, batch_tokens = self._score(batch, with_squared_probs)
            loss_fn(index, policy).backward()
            tokens += batch_tokens
        return tokens

    def _score(self, batch: PairBatch, with_squared_probs: bool) -> tuple[ChosenRejectedLogps, TokenCounts]:
        inputs = self.layout.collate(batch if len(batch) else DUMMY_BATCH)
        logps = self.model.score(inputs, with_squared_probs=with_squared_probs)
        return (logps, count_tokens(inputs)) if len(batch) else (empty_like(logps), TokenCounts())


def count_tokens(inputs: ModelInputs) -> TokenCounts:
    return TokenCounts(inputs.num_useful_tokens, inputs.num_padding_tokens, inputs.num_shared_tokens)


def empty_like(sides: ChosenRejectedLogps) -> ChosenRejectedLogps:
    """Logps of no pairs that stay on the autograd graph: their backward runs through the model and adds zero."""
    return ChosenRejectedLogps(_empty_side(sides.chosen), _empty_side(sides.rejected))


def _empty_side(side: ResponseLogps) -> ResponseLogps:
    squared = None if side.log_sum_squared_probs is None else side.log_sum_squared_probs[:0]
    return ResponseLogps(side.values[:0], side.lengths[:0], squared)
