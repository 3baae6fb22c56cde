"""Sequential micro-batch executor: one forward and one backward after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thresher.data.pair import Pair, PairBatch
from thresher.losses.pairs import NO_STATISTICS, ChosenRejectedLogps, ResponseLogps, TokenStatistics
from thresher.models.layouts import Layout, ModelInputs
from thresher.models.logps import PairModel
from thresher.models.router import ExpertLoad
from thresher.strategies.accumulate import ExecutedBatches, LossFn
from thresher.strategies.native.router_loss import RouterLoss, StepBalance
from thresher.strategies.strategy import TokenCounts

_IDS = np.zeros(2, dtype=np.int32)
# scored in place of a batch without pairs: FSDP ranks must run the same number of forwards
DUMMY_BATCH = PairBatch(np.zeros(1, dtype=np.int64), (Pair(_IDS, _IDS, _IDS),))


@dataclass(frozen=True)
class SequentialExecutor:
    """Scores micro-batches in turn; the output of a dummy batch is discarded.

    router_loss: adds the load-balancing loss of a mixture-of-experts model to the loss of a step.
    run_backward: of a loss, and whether it is the last one of the step.
    """

    model: PairModel
    layout: Layout
    router_loss: RouterLoss | None = None
    run_backward: Callable[[Tensor, bool], None] = lambda loss, _is_last: loss.backward()

    def score(self, batch: PairBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ChosenRejectedLogps:
        return self._score(batch, statistics)[0]

    def backward(
        self,
        batches: Sequence[PairBatch],
        loss_fn: LossFn,
        *,
        statistics: TokenStatistics,
        loss_scale: float | None = None,
    ) -> ExecutedBatches:
        balance = None if self.router_loss is None else self._balance_of_step(batches, self.router_loss)
        tokens = TokenCounts()
        with self.model.trained_weights_cast_once():
            for index, batch in enumerate(batches):
                policy, load, batch_tokens = self._score(batch, statistics)
                loss = loss_fn(index, policy)
                if balance is not None and load is not None:
                    loss = loss + balance.share(load) * (1.0 if loss_scale is None else loss_scale)
                self.run_backward(loss, index == len(batches) - 1)
                tokens += batch_tokens
        return ExecutedBatches(tokens, {} if balance is None else balance.metrics)

    def _score(
        self, batch: PairBatch, statistics: TokenStatistics
    ) -> tuple[ChosenRejectedLogps, ExpertLoad | None, TokenCounts]:
        inputs, load = self.layout.collate(batch if len(batch) else DUMMY_BATCH), None
        if self.router_loss is None:
            logps = self.model.score(inputs, statistics=statistics)
        else:
            logps, load = self.model.score_with_load(inputs, statistics=statistics)
        return (logps, load, count_tokens(inputs)) if len(batch) else (empty_like(logps), None, TokenCounts())

    def _balance_of_step(self, batches: Sequence[PairBatch], router_loss: RouterLoss) -> StepBalance:
        """Score all batches without gradient: the share of a batch depends on the tokens of the whole step."""
        # forked: the backward draws the same dropout masks again
        with torch.no_grad(), torch.random.fork_rng():
            return router_loss.of_step([self._score(batch, statistics=NO_STATISTICS)[1] for batch in batches])


def count_tokens(inputs: ModelInputs) -> TokenCounts:
    return TokenCounts(inputs.num_useful_tokens, inputs.num_padding_tokens, inputs.num_shared_tokens)


def count_step_tokens(inputs: Sequence[ModelInputs], batches: Sequence[PairBatch]) -> TokenCounts:
    """Count the tokens of a step; not those of dummy batches, in place of empty ones or at the end."""
    return sum((count_tokens(each) for each, batch in zip(inputs, batches, strict=False) if len(batch)), TokenCounts())


def loss_of_batch(index: int, sides: ChosenRejectedLogps, batches: Sequence[PairBatch], loss_fn: LossFn) -> Tensor:
    """Return the loss of a micro-batch; a dummy batch runs through the model and adds zero."""
    if index >= len(batches):
        return empty_like(sides).chosen.values.sum()
    return loss_fn(index, sides if len(batches[index]) else empty_like(sides))


def empty_like(sides: ChosenRejectedLogps) -> ChosenRejectedLogps:
    """Logps of no pairs that stay on the autograd graph: their backward runs through the model and adds zero."""
    return ChosenRejectedLogps(_empty_side(sides.chosen), _empty_side(sides.rejected))


def _empty_side(side: ResponseLogps) -> ResponseLogps:
    statistics = (None if each is None else each[:0] for each in (side.log_sum_squared_probs, side.entropy))
    return ResponseLogps(side.values[:0], side.lengths[:0], *statistics)
