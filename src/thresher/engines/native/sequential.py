"""Sequential micro-batch executor: one forward and one backward after another.

It can add the load-balancing loss of a mixture-of-experts model, over the tokens of a whole step. transformers computes
that loss per forward, so it depends on the batch. Here the batch is the step: no split into micro-batches and ranks
changes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from thresher.config.roles import ModelArgs
from thresher.data.example import Example, ExampleBatch
from thresher.distributed.groups import DataParallelGroup, Group, Metrics
from thresher.engines.accumulate import LossFn, MicroBatchExecutor, TokenCounts
from thresher.losses.metrics import MetricSum
from thresher.losses.pairs import NO_STATISTICS, ExampleLogps, TokenStatistics, concat_sides, map_tensors
from thresher.models.forward_check import check_logps
from thresher.models.layouts import Layout, ModelInputs
from thresher.models.lm_head import ScoredTokens
from thresher.models.logps import PairModel
from thresher.models.router import ExpertLoad

_IDS = np.zeros(2, dtype=np.int32)
# scored instead of a batch without pairs: FSDP ranks must run the same number of forwards
DUMMY_BATCH = ExampleBatch(np.zeros(1, dtype=np.int64), (Example.pair(_IDS, _IDS, _IDS),))


@dataclass(frozen=True)
class RouterLoss:
    """Weight of the loss, and the data-parallel ranks that split a step."""

    coef: float
    num_experts: int
    dp_group: DataParallelGroup = field(default_factory=DataParallelGroup)

    @classmethod
    def of(cls, args: ModelArgs, model: PairModel, dp_group: DataParallelGroup) -> RouterLoss | None:
        """The loss of a policy; None without moe_aux_loss_coef."""
        base: Any = model.base_model
        return cls(args.moe_aux_loss_coef, int(base.num_experts), dp_group) if args.moe_aux_loss_coef else None

    def of_step(self, loads: Iterable[ExpertLoad]) -> tuple[list[float], Metrics]:
        """Return the derivative of the step's loss by the router's probabilities, and the metrics; collective.

        The tokens routed to an expert have no gradient, so the loss is linear in the probabilities: the products of the
        micro-batches of all ranks with this derivative add up to it.
        """
        local = [0.0] * (2 * self.num_experts + 1)
        for load in loads:
            numbers = [*load.routed.tolist(), *load.probabilities.tolist(), float(load.num_tokens)]
            local = [one + other for one, other in zip(local, numbers, strict=True)]
        (*sums, num_tokens), _ = self.dp_group.all_reduce(local)
        routed, probabilities = sums[: self.num_experts], sums[self.num_experts :]
        factors = [self.num_experts * each / num_tokens**2 for each in routed]
        value = sum(factor * each for factor, each in zip(factors, probabilities, strict=True))
        metrics = self.dp_group.metrics_group.only_on_rank0({"moe_aux_loss": MetricSum(value, 1.0)})
        return [self.coef * factor for factor in factors], metrics


@dataclass(frozen=True)
class SequentialExecutor:
    """Scores micro-batches in turn; the output of a dummy batch is discarded."""

    model: PairModel
    layout: Layout
    router_loss: RouterLoss | None = None
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
        factors: list[float] = []
        metrics: Metrics = {}
        if self.router_loss is not None:
            # without gradient: the share of a batch depends on the whole step; the backward draws the same masks again
            with torch.no_grad(), torch.random.fork_rng():
                loads = [self._score(batch, NO_STATISTICS)[1] for batch in batches]
            factors, metrics = self.router_loss.of_step(load for load in loads if load is not None)
        with self.model.trained_weights_cast_once():
            for index, batch in enumerate(batches):
                policy, load, batch_tokens = self._score(batch, statistics)
                loss = loss_fn(index, policy)
                if load is not None:
                    share = (load.probabilities.new_tensor(factors) * load.probabilities).sum()
                    loss = loss + share * (1.0 if loss_scale is None else loss_scale)
                self.run_backward(loss, index == len(batches) - 1)
                tokens += batch_tokens
        return tokens, metrics

    def check_logps(self, batch: ExampleBatch) -> None:
        check_logps(self.model, self.layout, batch)

    def _score(
        self, batch: ExampleBatch, statistics: TokenStatistics
    ) -> tuple[ExampleLogps, ExpertLoad | None, TokenCounts]:
        inputs, load = self.layout.collate(batch if len(batch) else DUMMY_BATCH), None
        if self.router_loss is None:
            logps = self.model.score(inputs, statistics=statistics)
        else:
            logps, load = self.model.score_with_load(inputs, statistics=statistics)
        if len(batch):
            return logps, load, count_tokens(inputs)
        return empty_like(logps), None if load is None else load.of_no_tokens(), TokenCounts()


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
