"""From hidden states to the logps of chosen and rejected responses; shared by all engines."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.host_copies import copy_to_device
from thresher.losses.pairs import NO_STATISTICS, ChosenRejectedLogps, ResponseLogps, TokenStatistics
from thresher.models.layouts import ModelInputs
from thresher.models.lm_head import (
    LMHead,
    LogitTransform,
    log_sum_squared_probs,
    target_logps,
    target_logps_and_entropy,
)


class ScoredTokens(NamedTuple):
    """Per-token values of a micro-batch, [num_tokens] each: logps with gradient, and the statistics on request."""

    logps: Tensor
    log_sum_squared_probs: Tensor | None = None
    entropy: Tensor | None = None

    def stack(self) -> Tensor:
        """Return the values that are present as one tensor: [num_values, num_tokens]."""
        return torch.stack([each for each in self if each is not None])

    @classmethod
    def unstack(cls, rows: Tensor, statistics: TokenStatistics) -> ScoredTokens:
        """Inverse of `stack`."""
        remaining = iter(rows)
        return cls(next(remaining), *(next(remaining) if each else None for each in statistics))


def score_rows(
    head: LMHead,
    states: Tensor,
    rows: Tensor,
    targets: Tensor,
    *,
    context_parallel: ContextParallel | None = None,
    statistics: TokenStatistics = NO_STATISTICS,
) -> ScoredTokens:
    """Return the logp of each target and the requested statistics at each row.

    states: [rows, hidden], this process's sequence shard with context_parallel; rows: [num_scored] the row of the full
    sequence that predicts each target.
    """
    count = len(targets)
    if context_parallel is not None:  # on the host, because the number of rows depends on their values
        index, rows = context_parallel.local_scored_rows(rows, len(states))
        targets, index = targets[index], copy_to_device(index, states.device)
    rows, targets = copy_to_device(rows, states.device), copy_to_device(targets, states.device)
    scored = states.index_select(0, rows)
    if statistics.entropy:
        logps, entropy = target_logps_and_entropy(head, scored, targets)
    else:
        logps, entropy = target_logps(head, scored, targets), None
    squared_probs = log_sum_squared_probs(head, scored) if statistics.squared_probs else None
    if context_parallel is None:
        return ScoredTokens(logps, squared_probs, entropy)
    gather = partial(context_parallel.all_gather_logps, index=index, count=count)
    statistics_of_all = (None if each is None else gather(each) for each in (squared_probs, entropy))
    return ScoredTokens(gather(logps), *statistics_of_all)


def split_sides(batch: ModelInputs, tokens: ScoredTokens, device: torch.device) -> ChosenRejectedLogps:
    """Split per-token values into chosen and rejected; chosen responses come first."""
    chosen_lengths, rejected_lengths = (
        copy_to_device(each, device) for each in (batch.chosen_lengths, batch.rejected_lengths)
    )
    split = int(batch.chosen_lengths.sum())
    return ChosenRejectedLogps(
        _side(tokens, slice(None, split), chosen_lengths),
        _side(tokens, slice(split, None), rejected_lengths),
    )


def _side(tokens: ScoredTokens, part: slice, lengths: Tensor) -> ResponseLogps:
    statistics = (None if each is None else each[part] for each in tokens[1:])
    return ResponseLogps(tokens.logps[part], lengths, *statistics)


def logit_transform(config: PreTrainedConfig) -> LogitTransform:
    """Read the scale and soft cap of a model's logits from its config."""
    config = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere and others, Falcon-H1
        scale *= float(getattr(config, name, None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)  # Granite; HyperCLOVA X multiplies by it
    scale = scale * divisor if config.model_type == "hyperclovax" else scale / divisor
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))  # Gemma 2
