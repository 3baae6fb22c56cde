"""Pairs in, per-token logps out: the one forward that training, evaluation and the reference share.

Only rows that predict scored tokens reach the LM head, and their logits are never whole in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from thresher.losses.pairs import ResponseLogps, SidesLogps
from thresher.models.attention import PAIR_ATTENTION, register_pair_attention
from thresher.models.attention.segments import KeptRows, Visibility
from thresher.models.head import Head, LogitTransform, log_collision, target_logps
from thresher.models.layouts import ArrangedBatch, Layout
from thresher.models.lean import as_written, make_lean
from thresher.models.load import max_positions
from thresher.models.pruning import prune_last_layer


@dataclass(frozen=True)
class PairModel:
    """A causal LM taken apart at the hidden states: backbone, head, and what the family does to its logits."""

    causal_lm: nn.Module
    compute_dtype: torch.dtype
    prunes_last_layer: bool = False

    @classmethod
    def for_layout(cls, causal_lm: nn.Module, compute_dtype: torch.dtype, layout: Layout) -> PairModel:
        """Give a model the attention that a layout's rows need, and the savings that its shape allows."""
        if not layout.needs_pair_attention:
            return cls(causal_lm, compute_dtype)
        register_pair_attention()
        plain = _plain(causal_lm)
        plain.set_attn_implementation(PAIR_ATTENTION)
        make_lean(plain.get_decoder())
        return cls(causal_lm, compute_dtype, prune_last_layer(plain.get_decoder()))

    @property
    def backbone(self) -> nn.Module:
        decoder: nn.Module = _plain(self.causal_lm).get_decoder()
        return decoder

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = _plain(self.causal_lm).get_output_embeddings()
        return head

    @property
    def device(self) -> torch.device:
        return next(self.causal_lm.parameters()).device

    @property
    def max_positions(self) -> int | None:
        return max_positions(_plain(self.causal_lm).config)

    def score(self, batch: ArrangedBatch, *, with_log_collision: bool = False) -> SidesLogps:
        """Score the response tokens of a micro-batch; gradients flow unless the caller forbids them."""
        device = self.device
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.model_inputs.items()}
        # segments reach our attention function through the keyword arguments that transformers hands down
        context: dict[str, object] = {} if batch.segments is None else {"pair_visibility": Visibility(batch.segments)}
        scored = batch.scored_rows
        if self.prunes_last_layer and batch.kept is not None and batch.scored_in_kept is not None and len(scored):
            context["pair_kept"] = KeptRows(batch.kept.rows.to(device), batch.kept.visibility)
            scored = batch.scored_in_kept
        with self.precision(device):
            hidden = self.backbone(**inputs, use_cache=False, **context).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, scored.to(device))
        targets = batch.targets.to(device)
        head = self.head_for(rows)
        values = target_logps(head, rows, targets)
        collision = log_collision(head, rows) if with_log_collision else None
        chosen_lengths, rejected_lengths = batch.chosen_lengths.to(device), batch.rejected_lengths.to(device)
        split = int(batch.chosen_lengths.sum())
        return SidesLogps(
            ResponseLogps(values[:split], chosen_lengths, None if collision is None else collision[:split]),
            ResponseLogps(values[split:], rejected_lengths, None if collision is None else collision[split:]),
        )

    def head_for(self, rows: Tensor) -> Head:
        """The head as it scores such rows: in our precision, or in fp64 where everything is."""
        compute_dtype = rows.dtype if rows.dtype == torch.float64 else self.compute_dtype
        return Head(self.head.weight, self.head.bias, compute_dtype, logit_transform(self.causal_lm))

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        stored = self.head.weight.dtype
        if self.compute_dtype == stored:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype)


def logit_transform(model: nn.Module) -> LogitTransform:
    """Read from a model's config what its family does to logits."""
    config = _plain(model).config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere and others, Falcon-H1
        scale *= float(getattr(config, name, None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)  # Granite; HyperCLOVA X multiplies by it
    scale = scale * divisor if config.model_type == "hyperclovax" else scale / divisor
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))  # Gemma 2


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Let a model compute as its authors wrote it, for the length of a `with` block."""
    plain = _plain(model)
    before = plain.config._attn_implementation
    if before != PAIR_ATTENTION:
        yield
        return
    # not every family has sdpa: the scores of Gemma 2 are capped
    plain.set_attn_implementation("sdpa" if plain._supports_sdpa else "eager")
    try:
        with as_written(plain):
            yield
    finally:
        plain.set_attn_implementation(before)


def _plain(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper (adapters live in its layers and stay active)."""
    unwrap = getattr(model, "get_base_model", None)
    return cast("PreTrainedModel", model if unwrap is None else unwrap())
