"""Search settings: changes that make a run fit, and meshes that need fewer GPU-hours.

A mesh is evaluated with its fastest choice of gradient checkpointing, ZeRO stage, sequence parallelism and token
budget. The pairs per step stay the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from thresher.builders.memory import held_memory
from thresher.distributed.mesh import ParallelDims
from thresher.errors import UserError
from thresher.plan.estimate import Estimate

# more rows neither make products faster nor save much communication
_BUDGETS = (2048, 4096, 8192, 16384, 32768)
# predictions that are closer are not worth a change of the config
WORTHWHILE = 0.03
_MOST_PROPOSALS = 3
_STRATEGY, _TRAINING = "actor_train.strategy_args.strategy_config", "actor_train.training_args"


class Change(NamedTuple):
    """A change of the config, as it is written, and the peak memory with it."""

    text: str
    peak: float
    fits: bool


def changes_that_help(estimate: Estimate) -> list[Change]:
    """Changes that lower the peak: the fitting ones from the least intrusive on, or all by peak if none fits."""
    found: list[Change] = []
    for text, changes in _candidates(estimate):
        if "GPUs" in text and any(change.fits and "GPUs" in change.text for change in found):
            break  # more GPUs than needed
        try:
            other = estimate.but(**changes)
            if other.peak < estimate.peak:
                found.append(Change(text, other.peak, other.fits))
        except UserError:  # sizes that the model, the workers or the data do not allow
            continue
    return [change for change in found if change.fits] or sorted(found, key=lambda change: change.peak)


def _candidates(estimate: Estimate) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes and how they are written, from the least intrusive to the most expensive."""
    config, cluster, dims = estimate.config, estimate.cluster, estimate.dims
    training, budget = config.actor_train.training_args, estimate.largest_budget
    lora = {} if config.uses_lora else {"lora_rank": 16}
    full = {} if training.gradient_checkpointing == "full" else {"gradient_checkpointing": "full"}
    splits_rows = estimate.allows_sequence_parallel and not estimate.settings.sequence_parallel
    strategies: list[dict[str, Any]] = [{"sequence_parallel": True}] if splits_rows and dims.tp > 1 else []
    strategies += [{"zero_stage": stage} for stage in range(estimate.settings.zero_stage + 1, 4)]
    if not estimate.parts.layout.needs_pair_attention:
        budget = 2048
    if budget is not None and budget < (training.max_tokens_per_micro_batch or estimate.workload.largest.total):
        yield _written(training={"max_tokens_per_micro_batch": budget})
    yield from (_written(strategy=strategy) for strategy in strategies)
    if training.gradient_checkpointing == "off":
        yield _written(training={"gradient_checkpointing": "selective"})
    if full:
        yield _written(training=full)
    if dims.dp_replicate > 1:
        yield _written(strategy={"dp_replicate": 1})
    if dims.ep == 1 and estimate.num_experts:
        yield _written(strategy={"ep_size": min(cluster.gpus_per_node, cluster.num_gpus)})
    for tp in (2, 4, 8):
        if dims.tp < tp <= min(cluster.gpus_per_node, cluster.num_gpus):
            yield _written(strategy={"tp_size": tp, **({"sequence_parallel": True} if splits_rows else {})})
    if lora:
        yield _written(model=lora)
        if full:
            yield _written(model=lora, training=full)
    for factor in (2, 4, 8, 16):
        more = replace(cluster, num_gpus=factor * cluster.num_gpus)
        yield f"{more.num_gpus} GPUs", {"cluster": more}
        if full:
            yield f"{more.num_gpus} GPUs and gradient_checkpointing=full", {"cluster": more, "training": full}


def _written(**changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    values = [f"{name}={str(value).lower()}" for section in changes.values() for name, value in section.items()]
    return " and ".join(values), changes


@dataclass(frozen=True)
class Proposal:
    """A mesh that fits."""

    changes: dict[str, Any]  # keys of the config to set, with their values
    estimate: Estimate

    @property
    def overrides(self) -> list[str]:
        """The changes as they are written on the command line."""
        return [f"{key}={json.dumps(value)}" for key, value in self.changes.items()]


def cheaper_meshes(estimate: Estimate) -> list[Proposal]:
    """Up to three meshes that need fewer GPU-hours, the cheapest first; if the run does not fit, any that fit."""
    limit = (1 - WORTHWHILE) * estimate.step_seconds if estimate.fits else float("inf")
    return [found for found in search_meshes(estimate) if found.estimate.step_seconds < limit][:_MOST_PROPOSALS]


def search_meshes(estimate: Estimate) -> list[Proposal]:
    """All meshes that fit, each with its fastest settings, the fastest first."""
    fastest = [fastest_of_mesh(estimate, dims) for dims in possible_meshes(estimate)]
    found = [Proposal(_changes(estimate, each), each) for each in fastest if each is not None]
    return sorted(found, key=lambda proposal: proposal.estimate.step_seconds)


def possible_meshes(estimate: Estimate) -> Iterator[ParallelDims]:
    """Every division of the GPUs, and of experts; with tp and cp within a node unless the config's are not."""
    cluster, own = estimate.cluster, estimate.dims
    most_inner = max(min(cluster.gpus_per_node, cluster.num_gpus), own.tp * own.cp)
    for tp in _divisors(cluster.num_gpus):
        for cp in _divisors(cluster.num_gpus // tp):
            if tp * cp > most_inner:
                continue
            for pp in _divisors(cluster.num_gpus // (tp * cp)):
                num_data_ranks = cluster.num_gpus // (tp * cp * pp)
                if num_data_ranks > estimate.pairs_per_step or pp > estimate.known.size.num_layers:
                    continue
                for replicas in _divisors(num_data_ranks):
                    shards = num_data_ranks // replicas
                    for ep in _divisors(math.gcd(shards * cp * tp, estimate.num_experts or 1)):
                        yield ParallelDims(pp, replicas, shards, cp, tp, ep)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def fastest_of_mesh(estimate: Estimate, dims: ParallelDims) -> Estimate | None:
    """The fastest settings of a mesh that fit; None if the run does not allow it, or it does not fit."""
    strategy = {
        "tp_size": dims.tp,
        "cp_size": dims.cp,
        "pp_size": dims.pp,
        "ep_size": dims.ep,
        "dp_replicate": dims.dp_replicate,
        "virtual_pp_size": estimate.settings.virtual_pp_size if dims.pp > 1 else 1,
        "sequence_parallel": False,
        "zero_stage": 3,
    }
    try:
        least = estimate.but(strategy=strategy, training=_same_pairs_per_step(estimate, dims.num_data_ranks))
    except UserError:  # sizes that the model, the layout of rows or the workers do not allow
        return None
    if any(held_memory(process).total > least.usable_memory for process in least.processes.values()):
        return None
    # without recomputation there are no inputs to offload
    recomputations = ("off", "selective", "full")[estimate.config.actor_train.training_args.activation_offload :]
    found: list[Estimate] = []
    for changes in _strategies(estimate, dims):
        try:
            staged = least.but(strategy=changes)
        except UserError:  # with other settings of the config
            continue
        for budget in _budgets(estimate):
            candidates = (
                staged.but(training={"max_tokens_per_micro_batch": budget, "gradient_checkpointing": recompute})
                for recompute in recomputations
            )
            # less recomputation is never slower
            fitting = next((each for each in candidates if each.fits), None)
            if fitting is not None:
                found.append(fitting)
            if dims.pp == 1 and (fitting is None or fitting.workload.most_micro_batches == 1):
                break  # more rows need more memory, or change nothing; a pipeline also holds fewer micro-batches then
    return min(found, key=lambda each: (each.step_seconds, each.token_budget != estimate.token_budget), default=None)


def _strategies(estimate: Estimate, dims: ParallelDims) -> Iterator[dict[str, Any]]:
    """ZeRO stages, from the least memory on, each with and without sequence parallelism."""
    splits = (False, True) if dims.tp > 1 and estimate.allows_sequence_parallel else (False,)
    for zero_stage, splits_rows in product((3, 2, 1) if dims.uses_fsdp else (3,), splits):
        yield {"zero_stage": zero_stage, "sequence_parallel": splits_rows}


def _budgets(estimate: Estimate) -> Sequence[int | None]:
    own = estimate.config.actor_train.training_args.max_tokens_per_micro_batch
    if not estimate.parts.layout.needs_pair_attention and own is None:
        return [None]  # padded rows are limited by a number of pairs
    return sorted({*_BUDGETS, estimate.token_budget})


def _same_pairs_per_step(estimate: Estimate, num_data_ranks: int) -> dict[str, Any]:
    training, pairs = estimate.config.actor_train.training_args, estimate.pairs_per_step
    if training.global_batch_size is not None:
        return {}
    accumulation, rest = divmod(pairs, training.per_device_train_batch_size * num_data_ranks)
    if rest:
        return {"global_batch_size": pairs, "gradient_accumulation_steps": 1}
    return {"gradient_accumulation_steps": accumulation}


def _changes(estimate: Estimate, found: Estimate) -> dict[str, Any]:
    """Settings in which a mesh differs from the config."""
    own, other = estimate.config.actor_train.training_args, found.config.actor_train.training_args
    return {
        f"{prefix}.{name}": value
        for prefix, before, after in ((_STRATEGY, estimate.settings, found.settings), (_TRAINING, own, other))
        for name, value in after
        if value != getattr(before, name)
    }
