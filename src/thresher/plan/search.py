"""Build the estimate of a config on a cluster, and find changes that make a run fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.plan.compute import Cluster
from thresher.plan.estimate import Estimate
from thresher.plan.hardware import Hardware
from thresher.plan.other_strategies import as_fsdp2

GPUS_PER_NODE = 8


def estimate_run(
    config: DPOConfig, gpu: Hardware, nodes: int | None = None, gpus_per_node: int | None = None
) -> Estimate:
    """Estimate a run with one worker per GPU; nodes and gpus_per_node replace the number of workers of the config."""
    per_node = gpus_per_node or GPUS_PER_NODE
    is_given = nodes is not None or gpus_per_node is not None
    num_gpus = (nodes or 1) * per_node if is_given else config.actor_train.num_processes
    translated = as_fsdp2(config, num_gpus)
    return Estimate(translated.config, Cluster(gpu, per_node, num_gpus), note=translated.note)


class Change(NamedTuple):
    """A change of the config, as it is written, and the peak memory with it."""

    text: str
    peak: int
    fits: bool


def changes_that_help(estimate: Estimate) -> list[Change]:
    """Changes that lower the peak: those that fit, from the least intrusive on, or by peak if none fits."""
    found: list[Change] = []
    for text, build in _candidates(estimate):
        if "GPUs" in text and any(change.fits and "GPUs" in change.text for change in found):
            break  # more GPUs than needed
        try:
            other = build()
            if other.peak < estimate.peak:
                found.append(Change(text, other.peak, other.fits))
        except UserError:  # sizes that the model, the workers or the data do not allow
            continue
    return [change for change in found if change.fits] or sorted(found, key=lambda change: change.peak)


def _candidates(estimate: Estimate) -> Iterator[tuple[str, Callable[[], Estimate]]]:
    """From the least intrusive to the most expensive change; growing numbers of GPUs come last."""
    config, cluster, dims = estimate.config, estimate.cluster, estimate.dims
    training, budget = config.actor_train.training_args, estimate.largest_budget
    recompute = {} if training.gradient_checkpointing == "full" else {"gradient_checkpointing": "full"}
    if not estimate.parts.layout.needs_pair_attention:
        budget = 2048
    if budget is not None and budget < (training.max_tokens_per_micro_batch or estimate.workload.largest.total):
        name = f"max_tokens_per_micro_batch={budget}"
        yield name, partial(with_settings, estimate, training={"max_tokens_per_micro_batch": budget})
    has_axes = estimate.note is None  # the settings of another strategy have other names
    splits_rows = has_axes and estimate.allows_sequence_parallel
    if splits_rows and dims.tp > 1 and not estimate.settings.sequence_parallel:
        yield "sequence_parallel=true", partial(with_settings, estimate, strategy={"sequence_parallel": True})
    for zero_stage in range(estimate.settings.zero_stage + 1, 4) if has_axes else ():
        yield f"zero_stage={zero_stage}", partial(with_settings, estimate, strategy={"zero_stage": zero_stage})
    # other strategies have a selective recomputation of their own
    if has_axes and training.gradient_checkpointing == "off":
        selective = {"gradient_checkpointing": "selective"}
        yield "gradient_checkpointing=selective", partial(with_settings, estimate, training=selective)
    if recompute:
        yield "gradient_checkpointing=full", partial(with_settings, estimate, training=recompute)
    if has_axes and dims.dp_replicate > 1:
        yield "dp_replicate=1", partial(with_settings, estimate, strategy={"dp_replicate": 1})
    for tp in (2, 4, 8):
        if has_axes and dims.tp < tp <= min(cluster.gpus_per_node, cluster.num_gpus):
            axes = {"tp_size": tp, **({"sequence_parallel": True} if splits_rows else {})}
            name = " and ".join(f"{key}={str(value).lower()}" for key, value in axes.items())
            yield name, partial(with_settings, estimate, strategy=axes)
    if not config.uses_lora:
        yield "lora_rank=16", partial(with_settings, estimate, model={"lora_rank": 16})
        if recompute:
            both = partial(with_settings, estimate, training=recompute, model={"lora_rank": 16})
            yield "lora_rank=16 and gradient_checkpointing=full", both
    for factor in (2, 4, 8, 16):
        more = replace(cluster, num_gpus=factor * cluster.num_gpus)
        yield f"{more.num_gpus} GPUs", partial(Estimate, config, more, estimate)
        if recompute:
            both = partial(with_settings, estimate, training=recompute, cluster=more)
            yield f"{more.num_gpus} GPUs and gradient_checkpointing=full", both


def with_settings(
    estimate: Estimate,
    *,
    training: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    cluster: Cluster | None = None,
    is_condensed: bool = False,
    budget_reason: str | None = None,
) -> Estimate:
    """The same run with other settings of the policy, or on other GPUs; budget_reason: of a chosen token budget."""
    role = estimate.config.actor_train
    changed: dict[str, Any] = {}
    if training:
        changed["training_args"] = role.training_args.model_copy(update=training)
    if model:
        changed["model_args"] = role.model_args.model_copy(update=model)
    if strategy:
        values = {**estimate.settings.model_dump(exclude_defaults=True), **strategy}
        given = {"strategy_name": role.strategy_name, "strategy_config": values}
        changed["strategy_args"] = type(role.strategy_args).model_validate(given)
    config = estimate.config.model_copy(update={"actor_train": role.model_copy(update=changed)})
    return Estimate(
        config, cluster or estimate.cluster, estimate, is_condensed=is_condensed, budget_reason=budget_reason
    )
