"""How the native engine goes through micro-batches: one forward and one backward after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thresher.data.pair import Pair, PairBatch
from thresher.losses.pairs import ChosenRejectedLogps, ResponseLogps
from thresher.models.layouts import ArrangedBatch, Layout
from thresher.models.logps import PairModel
from thresher.strategies.accumulate import LossOf
from thresher.strategies.strategy import TokenCounts

_IDS = np.zeros(2, dtype=np.int32)
# what a rank scores that has no pairs left while others, which need its part of the weights, have some
STAND_IN = PairBatch(np.zeros(1, dtype=np.int64), (Pair(_IDS, _IDS, _IDS),))


@dataclass(frozen=True)
class OneByOne:
    """Micro-batches in turn; one without pairs is a forward whose result nobody sees."""

    model: PairModel
    layout: Layout

    def score(self, batch: PairBatch, *, with_log_collision: bool = False) -> ChosenRejectedLogps:
        return self._score(batch, with_log_collision)[0]

    def backward(self, batches: Sequence[PairBatch], loss_of: LossOf, *, with_log_collision: bool) -> TokenCounts:
        tokens = TokenCounts()
        for number, batch in enumerate(batches):
            policy, counted = self._score(batch, with_log_collision)
            loss_of(number, policy).backward()
            tokens += counted
        return tokens

    def _score(self, batch: PairBatch, with_log_collision: bool) -> tuple[ChosenRejectedLogps, TokenCounts]:
        arranged = self.layout.arrange(batch if len(batch) else STAND_IN)
        scored = self.model.score(arranged, with_log_collision=with_log_collision)
        return (scored, count_tokens(arranged)) if len(batch) else (none_of(scored), TokenCounts())


def count_tokens(arranged: ArrangedBatch) -> TokenCounts:
    return TokenCounts(arranged.num_useful_tokens, arranged.num_padding_tokens, arranged.num_shared_tokens)


def none_of(sides: ChosenRejectedLogps) -> ChosenRejectedLogps:
    """No pairs, on the graph of some: their backward goes through the model and adds nothing."""
    return ChosenRejectedLogps(_none_of_side(sides.chosen), _none_of_side(sides.rejected))


def _none_of_side(side: ResponseLogps) -> ResponseLogps:
    collision = None if side.log_collision is None else side.log_collision[:0]
    return ResponseLogps(side.values[:0], side.lengths[:0], collision)
