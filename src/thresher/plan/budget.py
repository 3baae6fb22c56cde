"""The token budget of micro-batches: as set, as recorded in a checkpoint, or chosen by formula from a GPU's memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from thresher.builders.inputs import DEFAULT_TOKENS_PER_MICRO_BATCH, RunInputs
from thresher.checkpoint.json_io import load_json
from thresher.config import DPOConfig
from thresher.data.batching.batches import CostModel
from thresher.data.store.reader import Lengths
from thresher.errors import UserError
from thresher.models.layouts import Layout
from thresher.observability.details import DETAIL
from thresher.plan.compute import Cluster
from thresher.plan.estimate import Estimate
from thresher.plan.hardware import Gpu, Hardware
from thresher.plan.pairs import PairLengths
from thresher.plan.search import GPUS_PER_NODE, with_settings

logger = logging.getLogger(__name__)

# predicted peaks are within 10 % of those of real steps (docs/guides/plan.md)
_SHARE_OF_MEMORY = 0.9
# a larger budget must shorten the predicted step by more than this, since it takes memory
_LEAST_GAIN = 0.02
_DOUBLINGS = 3


@dataclass(frozen=True)
class TokenBudget:
    """tokens: None for the default of the layout."""

    tokens: int | None
    reason: str


def with_token_budget(
    config: DPOConfig, inputs: RunInputs, checkpoint: Path | None, find_gpu: Callable[[], Gpu | None]
) -> RunInputs:
    """Choose the token budget of a run once, for all ranks; a resumed run keeps the one of its checkpoint."""
    if inputs.max_tokens is not None:
        return inputs
    if checkpoint is not None:
        budget = _recorded(checkpoint)
    elif (gpu := find_gpu()) is None:
        budget = TokenBudget(None, "the default on CPUs")
    else:
        budget = choose_budget(config, inputs.train.lengths, gpu.hardware)
    packed = DEFAULT_TOKENS_PER_MICRO_BATCH if inputs.layout.needs_pair_attention else None
    tokens, extra = budget.tokens or packed, DETAIL if budget.tokens in (None, packed) else {}
    shown = "no limit" if tokens is None else f"{tokens:,}"
    logger.info("max_tokens_per_micro_batch: auto -> %s, %s", shown, budget.reason, extra=extra)
    return replace(inputs, max_tokens=budget.tokens)


def _recorded(checkpoint: Path) -> TokenBudget:
    """The budget of the run that saved a checkpoint; those of earlier versions do not record it, and used defaults."""
    values = load_json(checkpoint / "trainer.json")
    tokens = values.get("max_tokens_per_micro_batch") if isinstance(values, dict) else None
    return TokenBudget(tokens if isinstance(tokens, int) else None, f"as in {checkpoint}")


def choose_budget(config: DPOConfig, lengths: Lengths, gpu: Hardware) -> TokenBudget:
    """Choose by the formulas of `thresher plan` for the workers of the config, each with such a GPU."""
    cluster = Cluster(gpu, config.num_gpus_per_node or GPUS_PER_NODE, config.actor_train.num_processes)
    try:
        return budget_of(Estimate(config, cluster, pairs=PairLengths(lengths, "the pairs of the run")))
    except UserError as error:
        return TokenBudget(None, f"the default, because {error}")


def budget_of(estimate: Estimate) -> TokenBudget:
    """The budget that a run without one gets, at least as large as the longest pair."""
    gpu = replace(estimate.cluster.gpu, memory=_SHARE_OF_MEMORY * estimate.cluster.gpu.memory)
    careful = Estimate(estimate.config, replace(estimate.cluster, gpu=gpu), estimate)
    layout, lengths = estimate.parts.layout, estimate.pairs.lengths
    if not layout.needs_pair_attention and careful.fits:
        return TokenBudget(None, f"per_device_train_batch_size pairs fit into {gpu.name}")
    budget = _fastest(careful) if layout.needs_pair_attention else _fitting(careful)
    # a longer pair gets a micro-batch to itself, so that a smaller budget would only make others smaller
    longest = _longest_pair(lengths, layout)
    return budget if longest <= (budget.tokens or 0) else TokenBudget(longest, f"the longest pair; {budget.reason}")


def with_chosen_budget(estimate: Estimate) -> Estimate:
    """The estimate of a run as it will be: with the budget that is chosen for it if the config sets none."""
    is_set = estimate.config.actor_train.training_args.max_tokens_per_micro_batch is not None
    if is_set or estimate.note is not None:  # other strategies keep the default
        return estimate
    budget = budget_of(estimate)
    return _with_budget(estimate, budget.tokens, budget.reason)


def _fastest(estimate: Estimate) -> TokenBudget:
    """The smallest budget from the default on that no larger one beats by much.

    Larger micro-batches help while FSDP2 gathers every weight once per micro-batch and the links are slower than the
    products. They do not help once the transfers are hidden, and in a pipeline they leave too few micro-batches.
    """
    largest = _fitting(estimate)
    sizes = [DEFAULT_TOKENS_PER_MICRO_BATCH * 2**i for i in range(_DOUBLINGS + 1)]
    fitting = [size for size in sizes if size <= (largest.tokens or 0)]
    if not fitting:
        return largest
    seconds = {size: sum(_with_budget(estimate, size).step_seconds) for size in fitting}
    best = min(seconds.values())
    chosen = next(size for size in fitting if seconds[size] <= (1 + _LEAST_GAIN) * best)
    return TokenBudget(chosen, f"by formula: up to about {largest.tokens:,} fit into {estimate.cluster.gpu.name}")


def _fitting(estimate: Estimate) -> TokenBudget:
    name, largest = estimate.cluster.gpu.name, estimate.largest_budget
    if largest is None:
        return TokenBudget(None, f"although it does not fit into {name} by formula")
    return TokenBudget(largest, f"by formula the largest that fits into {name}")


def _with_budget(estimate: Estimate, tokens: int | None, reason: str | None = None) -> Estimate:
    return with_settings(estimate, training={"max_tokens_per_micro_batch": tokens}, budget_reason=reason)


def _longest_pair(lengths: Lengths, layout: Layout) -> int:
    """Tokens of the pair with most of them, with padding."""
    if layout.needs_pair_attention:
        return int(CostModel(attention_per_key=0, shares_prompt=layout.shares_prompt).tokens(lengths).max())
    return 2 * int((lengths[:, 0].astype(np.int64) + lengths[:, 1:].max(axis=1)).max())
