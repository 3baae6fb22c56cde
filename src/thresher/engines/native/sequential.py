"""Sequential micro-batch executor: one forward and one backward after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from thresher.config.roles import ModelArgs
from thresher.data.example import Example, ExampleBatch
from thresher.distributed.groups import DataParallelGroup, Group, Metrics
from thresher.engines.accumulate import LossFn, MicroBatchExecutor, TokenCounts
from thresher.losses.pairs import NO_STATISTICS, ExampleLogps, TokenStatistics, concat_sides, map_tensors
from thresher.models.forward_check import check_logps
from thresher.models.layouts import Layout, ModelInputs
from thresher.models.lm_head import ScoredTokens
from thresher.models.logps import PairModel
from thresher.models.router import ExpertBalance, num_experts

_IDS = np.zeros(2, dtype=np.int32)
# scored instead of a batch without pairs: FSDP ranks must run the same number of forwards
_DUMMY_BATCH = ExampleBatch(np.zeros(1, dtype=np.int64), (Example.pair(_IDS, _IDS, _IDS),))


@dataclass(frozen=True)
class SequentialExecutor:
    """Scores micro-batches in turn; the output of a dummy batch is discarded."""

    model: PairModel
    layout: Layout
    # takes a loss, and whether it is the last one of the step
    run_backward: Callable[[Tensor, bool], None] = lambda loss, _is_last: loss.backward()

    def score(self, batch: ExampleBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ExampleLogps:
        return self._score(batch, statistics)[0]

    def backward(
        self,
        batches: Sequence[ExampleBatch],
        loss_fn: LossFn,
        *,
        statistics: TokenStatistics,
        loss_scale: float | None = None,
    ) -> tuple[TokenCounts, Metrics]:
        tokens = TokenCounts()

        def measure() -> None:
            for batch in batches:
                self._score(batch, NO_STATISTICS)

        with balanced(self.model, measure, loss_scale) as metrics, self.model.trained_weights_cast_once():
            for index, batch in enumerate(batches):
                policy, batch_tokens = self._score(batch, statistics)
                self.run_backward(loss_fn(index, policy), index == len(batches) - 1)
                tokens += batch_tokens
        return tokens, metrics

    def check_logps(self, batch: ExampleBatch) -> None:
        check_logps(self.model, self.layout, batch)

    def _score(self, batch: ExampleBatch, statistics: TokenStatistics) -> tuple[ExampleLogps, TokenCounts]:
        inputs = collate(self.layout, batch)
        logps = self.model.score(inputs, statistics=statistics)
        return (logps, count_tokens(inputs)) if len(batch) else (empty_like(logps), TokenCounts())


def collate(layout: Layout, batch: ExampleBatch) -> ModelInputs:
    """The inputs of a micro-batch; of a dummy one, whose rows stand for no token, if it is empty."""
    if len(batch):
        return layout.collate(batch)
    inputs = layout.collate(_DUMMY_BATCH)
    return replace(inputs, row_weights=torch.zeros_like(inputs.row_weights))


def collate_step(layout: Layout, batches: Sequence[ExampleBatch], num_scheduled: int) -> list[ModelInputs]:
    """The inputs of a step's micro-batches, and of dummy ones up to a number."""
    missing = [ExampleBatch(np.zeros(0, dtype=np.int64), ())] * (num_scheduled - len(batches))
    return [collate(layout, batch) for batch in [*batches, *missing]]


def with_balance(model: PairModel, args: ModelArgs, ranks: DataParallelGroup) -> PairModel:
    """Let a policy add its load-balancing loss, if it has one; over all tokens if the layout computes the last ones."""
    if not args.moe_aux_loss_coef:
        return model
    # before a pipeline's chunks, whose layers alone transformers would find in their first forward
    backbone: Any = model.backbone
    maybe_install_capturing_hooks(backbone)
    config = model.base_model.config.get_text_config()
    balance = ExpertBalance(args.moe_aux_loss_coef, num_experts(config), int(config.num_experts_per_tok), ranks)
    return replace(model, balance=balance)


@contextmanager
def balanced(model: PairModel, measure: Callable[[], None], loss_scale: float | None) -> Iterator[Metrics]:
    """Add the load-balancing loss of a step to a `with` block, if the model has one; return its metrics.

    measure: computes the rows of the step without gradient, because the loss of a row depends on all of them.
    """
    if model.balance is None:
        yield {}
        return
    with model.balance.measured():
        measure()
    with model.balance.added(loss_scale, model.device) as metrics:
        yield metrics


def count_tokens(inputs: ModelInputs) -> TokenCounts:
    return TokenCounts(inputs.num_useful_tokens, inputs.num_padding_tokens, inputs.num_shared_tokens)


def count_step_tokens(inputs: Sequence[ModelInputs], batches: Sequence[ExampleBatch]) -> TokenCounts:
    """Count the tokens of a step; without dummy batches, which replace empty ones or stand at the end."""
    return sum((count_tokens(each) for each, batch in zip(inputs, batches, strict=False) if len(batch)), TokenCounts())


def loss_of_batch(index: int, sides: ExampleLogps, batches: Sequence[ExampleBatch], loss_fn: LossFn) -> Tensor:
    """Return the loss of a micro-batch; a dummy batch runs through the model and adds zero."""
    if index >= len(batches):
        return empty_like(sides).chosen.values.sum()
    return loss_fn(index, sides if len(batches[index]) else empty_like(sides))


def empty_like(sides: ExampleLogps) -> ExampleLogps:
    """Logps of no pairs that stay on the autograd graph: their backward runs through the model and adds zero."""
    return map_tensors(sides, lambda tensor: tensor[:0])


def broadcast_scored(
    scored: ScoredTokens | None,  # in the last stage
    inputs: ModelInputs,
    statistics: TokenStatistics,
    pipeline: Group,
    dtype: torch.dtype,
    device: torch.device,
) -> ScoredTokens:
    """Broadcast the scored tokens of a micro-batch from the last stage of a pipeline."""
    if scored is not None and pipeline.size == 1:
        return scored
    rows = torch.empty(1 + sum(statistics), len(inputs.targets), dtype=dtype, device=device)
    if scored is not None:
        rows.copy_(scored.stack())
    dist.broadcast(rows, group=pipeline.group, group_src=pipeline.size - 1)
    return ScoredTokens.unstack(rows, statistics)


def distance_to_single_pairs(ours: ExampleLogps, one_by_one: MicroBatchExecutor, batch: ExampleBatch) -> float:
    """Mean distance in nats per token from the logps of the same pairs, each scored alone."""
    singles = [ExampleBatch(batch.pair_ids[i : i + 1], batch.pairs[i : i + 1]) for i in range(len(batch))]
    scored = [one_by_one.score(pair) for pair in singles]
    expected = torch.cat([side.values for side in concat_sides(scored).sides])
    found = torch.cat([side.values for side in ours.sides])
    return (found - expected).abs().mean().item() if len(expected) else 0.0
