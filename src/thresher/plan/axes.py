"""Search the layouts of axes: every way to divide the GPUs among them that fits, with its predicted step time.

A layout keeps the pairs per step. Each is evaluated with its fastest choice of gradient checkpointing, ZeRO stage and
token budget, and with sequence parallelism where tp and the model allow it. Layouts are compared by the mean of the
best and the worst case of the roofline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thresher.distributed.mesh import ParallelDims
from thresher.errors import UserError
from thresher.models.optimizations.recompute import Recompute
from thresher.plan.estimate import Estimate
from thresher.plan.search import with_settings

# more rows neither make products faster nor save much communication
_BUDGETS = (2048, 4096, 8192, 16384, 32768)
# predictions that are closer are not worth a change of the config
WORTHWHILE = 0.03
_MOST_PROPOSALS = 3
_STRATEGY, _TRAINING = "actor_train.strategy_args.strategy_config", "actor_train.training_args"


@dataclass(frozen=True)
class Proposal:
    """A layout of axes that fits. changes: keys of the config to set, with their values."""

    changes: dict[str, Any]
    estimate: Estimate

    @property
    def overrides(self) -> list[str]:
        """The changes as they are written on the command line."""
        return [f"{key}={json.dumps(value)}" for key, value in self.changes.items()]


def cheaper_layouts(estimate: Estimate) -> list[Proposal]:
    """Up to three layouts that need fewer GPU-hours, the cheapest first; of a run that does not fit, any that fit."""
    if estimate.note is not None:
        return []  # the run uses another strategy
    found = search_axes(estimate)
    if estimate.fits:
        limit = (1 - WORTHWHILE) * with_settings(estimate, is_condensed=True).mean_seconds
        found = [proposal for proposal in found if proposal.estimate.mean_seconds < limit]
    # the figures of the report are those of the sampled steps, not of a condensed one
    return [
        Proposal(proposal.changes, Estimate(proposal.estimate.config, estimate.cluster, estimate))
        for proposal in found[:_MOST_PROPOSALS]
    ]


def search_axes(estimate: Estimate) -> list[Proposal]:
    """All layouts of the axes that fit, each with its fastest settings, the fastest first."""
    fastest = [fastest_of_layout(estimate, dims) for dims in possible_axes(estimate)]
    found = [_proposal(estimate, each) for each in fastest if each is not None]
    return sorted(found, key=lambda proposal: proposal.estimate.mean_seconds)


def possible_axes(estimate: Estimate) -> Iterator[ParallelDims]:
    """Every division of the GPUs, with tp and cp within a node unless those of the config are not."""
    cluster, own = estimate.cluster, estimate.dims
    most_inner = max(min(cluster.gpus_per_node, cluster.num_gpus), own.tp * own.cp)
    for tp in _divisors(cluster.num_gpus):
        for cp in _divisors(cluster.num_gpus // tp):
            if tp * cp > most_inner:
                continue
            for pp in _divisors(cluster.num_gpus // (tp * cp)):
                num_data_ranks = cluster.num_gpus // (tp * cp * pp)
                if num_data_ranks > estimate.pairs_per_step or pp > estimate.shape.num_layers:
                    continue
                for replicas in _divisors(num_data_ranks):
                    yield ParallelDims(pp, replicas, num_data_ranks // replicas, cp, tp)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def fastest_of_layout(estimate: Estimate, dims: ParallelDims) -> Estimate | None:
    """The fastest settings of a layout that fit; None if the run does not allow it, or it does not fit."""
    variants, budgets = _Variants(estimate, dims), _budgets(estimate)
    try:
        least = variants.build(budgets[0], recompute="full", zero_stage=3)
    except UserError:  # sizes that the model, the layout of rows or the workers do not allow
        return None
    if any(memory.persistent > least.usable_memory for _, memory in least.memories.values()):
        return None
    fitting: list[Estimate] = []
    for budget in budgets:
        at_budget = variants.fitting(budget)
        fitting += at_budget
        if not at_budget and dims.pp == 1:
            break  # more rows need more memory; a pipeline also holds fewer micro-batches then
        if at_budget and at_budget[0].workload.most_micro_batches == 1:
            break  # a larger budget changes nothing
    own = estimate.token_budget
    return min(fitting, key=lambda found: (found.mean_seconds, found.token_budget != own), default=None)


def _budgets(estimate: Estimate) -> Sequence[int | None]:
    own = estimate.config.actor_train.training_args.max_tokens_per_micro_batch
    if not estimate.parts.layout.needs_pair_attention and own is None:
        return [None]  # padded rows are limited by a number of pairs
    return sorted({*_BUDGETS, estimate.token_budget})


class _Variants:
    """Estimates of one layout of axes with different settings; they share its stages."""

    def __init__(self, estimate: Estimate, dims: ParallelDims):
        self._estimate, self._dims = estimate, dims
        self._by_zero_stage: dict[int, Estimate] = {}
        training = estimate.config.actor_train.training_args
        # from the least; without one there are no inputs to offload
        least: tuple[Recompute, ...] = () if training.activation_offload else ("off",)
        self._recomputations: tuple[Recompute, ...] = (*least, "selective", "full")

    def fitting(self, budget: int | None) -> list[Estimate]:
        """Those that fit, without the ones that are slower than another for certain."""
        found: list[Estimate] = []
        for recompute in self._recomputations:
            for zero_stage in self._zero_stages:
                # with less recomputation, and with gathered weights, a step is never slower, unless less is compiled
                faster = [each for each in found if each.settings.zero_stage <= zero_stage]
                if any(each.recompute == "off" or recompute == "selective" for each in faster):
                    continue
                candidate = self.build(budget, recompute=recompute, zero_stage=zero_stage)
                if candidate.fits:
                    found.append(candidate)
        return found

    @property
    def _zero_stages(self) -> Sequence[int]:
        if self._dims.fsdp_size == 1:
            return (3,)
        return (1, 2, 3) if self._virtual_pp_size == 1 else (2, 3)

    @property
    def _virtual_pp_size(self) -> int:
        return self._estimate.settings.virtual_pp_size if self._dims.pp > 1 else 1

    def build(self, budget: int | None, *, recompute: Recompute, zero_stage: int) -> Estimate:
        training = {
            "gradient_checkpointing": recompute,
            "max_tokens_per_micro_batch": budget,
            **_same_pairs_per_step(self._estimate, self._dims.num_data_ranks),
        }
        like = self._by_zero_stage.get(zero_stage)
        if like is not None:
            return with_settings(like, training=training, is_condensed=True)
        dims = self._dims
        strategy = {
            "tp_size": dims.tp,
            "cp_size": dims.cp,
            "pp_size": dims.pp,
            "dp_replicate": dims.dp_replicate,
            "virtual_pp_size": self._virtual_pp_size,
            "zero_stage": zero_stage,
            # it sends and holds less than tp alone
            "sequence_parallel": dims.tp > 1 and self._estimate.allows_sequence_parallel,
        }
        others = [*self._by_zero_stage.values(), self._estimate]
        built = with_settings(others[0], strategy=strategy, training=training, is_condensed=True)
        self._by_zero_stage[zero_stage] = built
        return built


def _same_pairs_per_step(estimate: Estimate, num_data_ranks: int) -> dict[str, Any]:
    training, pairs = estimate.config.actor_train.training_args, estimate.pairs_per_step
    if training.global_batch_size is not None:
        return {}
    accumulation, rest = divmod(pairs, training.per_device_train_batch_size * num_data_ranks)
    if rest:
        return {"global_batch_size": pairs, "gradient_accumulation_steps": 1}
    return {"gradient_accumulation_steps": accumulation}


def _proposal(estimate: Estimate, found: Estimate) -> Proposal:
    """Name the settings in which a layout differs from the config."""
    changes: dict[str, Any] = {}
    own, other = estimate.settings, found.settings
    for name in type(own).model_fields:
        if getattr(own, name) != getattr(other, name):
            changes[f"{_STRATEGY}.{name}"] = getattr(other, name)
    training, changed = estimate.config.actor_train.training_args, found.config.actor_train.training_args
    for name in type(training).model_fields:
        if getattr(training, name) != getattr(changed, name):
            changes[f"{_TRAINING}.{name}"] = getattr(changed, name)
    return Proposal(changes, found)
