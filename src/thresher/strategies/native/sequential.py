"""How the native engine goes through micro-batches: one forward and one backward after another."""

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
# what a rank scores that has no pairs left while others, which need its part of the weights, have some
DUMMY_BATCH = PairBatch(np.zeros(1, dtype=np.int64), (Pair(_IDS, _IDS, _IDS),))


@dataclass(frozen=True)
class SequentialExecutor:
    """Micro-batches in turn; one without pairs is a forward whose result nobody sees."""

    model: PairModel
    layout: Layout

    def score(self, batch: PairBatch, *, with_squared_probs: bool = False) -> ChosenRejectedLogps:
        return self._score(batch, with_squared_probs)[0]

    def backward(self, batches: Sequence[PairBatch], loss_fn: LossFn, *, with_squared_probs: bool) -> TokenCounts:
        tokens = TokenCounts()
        for number, batch in enumerate(batches):
            policy, counted = self._score(batch, with_squared_probs)
            loss_fn(number, policy).backward()
            tokens += counted
        return tokens

    def _score(self, batch: PairBatch, with_squared_probs: bool) -> tuple[ChosenRejectedLogps, TokenCounts]:
        arranged = self.layout.collate(batch if len(batch) else DUMMY_BATCH)
        scored = self.model.score(arranged, with_squared_probs=with_squared_probs)
        return (scored, count_tokens(arranged)) if len(batch) else (empty_like(scored), TokenCounts())


def count_tokens(arranged: ModelInputs) -> TokenCounts:
    return TokenCounts(arranged.num_useful_tokens, arranged.num_padding_tokens, arranged.num_shared_tokens)


def empty_like(sides: ChosenRejectedLogps) -> ChosenRejectedLogps:
    """No pairs, on the graph of some: their backward goes through the model and adds nothing."""
    return ChosenRejectedLogps(_none_of_side(sides.chosen), _none_of_side(sides.rejected))


def _none_of_side(side: ResponseLogps) -> ResponseLogps:
    collision = None if side.log_sum_squared_probs is None else side.log_sum_squared_probs[:0]
    return ResponseLogps(side.values[:0], side.lengths[:0], collision)
