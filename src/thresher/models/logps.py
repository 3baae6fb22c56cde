"""Pairs in, per-token logps out: the one forward that training, evaluation and the reference share.

Only rows that predict scored tokens reach the LM head, and their logits are never whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from thresher.distributed.context_parallel import ContextParallel
from thresher.losses.pairs import ChosenRejectedLogps, ResponseLogps
from thresher.models.attention.interface import PAIR_ATTENTION, register_pair_attention
from thresher.models.attention.segments import KeptRows, PackedAttention
from thresher.models.layouts import Layout, ModelInputs
from thresher.models.layouts.packed import pad_to_multiple
from thresher.models.lm_head import LMHead, LogitTransform, VocabParallel, log_sum_squared_probs, target_logps
from thresher.models.loading.load import max_positions
from thresher.models.optimizations.last_layer import skip_unscored_rows
from thresher.models.optimizations.memory_efficient_layers import original_forwards, use_memory_efficient_layers
from thresher.models.pipeline_chunk import Chunk


@dataclass(frozen=True)
class PairModel:
    """A causal LM taken apart at the hidden states: backbone, head, and what the family does to its logits.

    row_share: the part of every packed row that this process computes; None where it computes all of them.
    """

    causal_lm: nn.Module
    compute_dtype: torch.dtype
    skips_unscored_rows: bool = False
    context_parallel: ContextParallel | None = None

    def __post_init__(self) -> None:
        plain: Any = self.base_model
        if getattr(plain.forward, "__func__", None) is not _forward_or_score:
            plain.original_forward = plain.forward
            plain.forward = MethodType(_forward_or_score, plain)

    @classmethod
    def for_layout(
        cls,
        causal_lm: nn.Module,
        compute_dtype: torch.dtype,
        layout: Layout,
        context_parallel: ContextParallel | None = None,
    ) -> PairModel:
        """Give a model the attention that a layout's rows need, and the savings that its shape allows."""
        if not layout.needs_pair_attention:
            return cls(causal_lm, compute_dtype)
        register_pair_attention()
        plain = base_model(causal_lm)
        plain.set_attn_implementation(PAIR_ATTENTION)
        use_memory_efficient_layers(plain.get_decoder())
        # which rows the last layer may leave out is known of whole rows only
        prunes = context_parallel is None and skip_unscored_rows(plain.get_decoder())
        return cls(causal_lm, compute_dtype, prunes, context_parallel)

    @property
    def base_model(self) -> PreTrainedModel:
        return base_model(self.causal_lm)

    @property
    def backbone(self) -> nn.Module:
        decoder: nn.Module = self.base_model.get_decoder()
        return decoder

    @property
    def head(self) -> nn.Linear:
        head: nn.Linear = self.base_model.get_output_embeddings()
        return head

    @property
    def device(self) -> torch.device:
        return next(self.causal_lm.parameters()).device

    @property
    def stored_dtype(self) -> torch.dtype:
        """The precision of the weights, and of the hidden states that layers add to."""
        return next(self.base_model.parameters()).dtype

    @property
    def hidden_size(self) -> int:
        return int(self.base_model.config.get_text_config().hidden_size)

    @property
    def max_positions(self) -> int | None:
        return max_positions(self.base_model.config)

    def score(self, batch: ModelInputs, *, with_squared_probs: bool = False) -> ChosenRejectedLogps:
        """Score the response tokens of a micro-batch; gradients flow unless the caller forbids them."""
        # through the model's own call, not past it: engines hang on to it what they do before and after a forward
        return self.split_sides(batch, *self.base_model(pair_request=partial(self._score, batch, with_squared_probs)))

    def compute_chunk(
        self, chunk: Chunk, batch: ModelInputs, entering: Tensor | None, with_squared_probs: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute some layers of a micro-batch: the hidden states after them or, after the last ones, what `sides`
        takes. Those that enter are None for the first layers.
        """
        request = partial(self._compute_chunk, chunk, batch, entering, with_squared_probs)
        computed: tuple[Tensor, Tensor | None] = self.base_model(pair_request=request)
        return computed

    def hidden_shape(self, batch: ModelInputs) -> tuple[int, int, int]:
        """The shape of a micro-batch's hidden states in this process, before and after every layer but a pruned one."""
        sequences, rows = self._padded(batch).model_inputs["input_ids"].shape
        parts = 1 if self.context_parallel is None else self.context_parallel.size
        return sequences, rows // parts, self.hidden_size

    def split_sides(self, batch: ModelInputs, values: Tensor, collision: Tensor | None) -> ChosenRejectedLogps:
        """Take the logps of all scored tokens apart: those of chosen responses come first."""
        chosen_lengths, rejected_lengths = batch.chosen_lengths.to(self.device), batch.rejected_lengths.to(self.device)
        split = int(batch.chosen_lengths.sum())
        return ChosenRejectedLogps(
            ResponseLogps(values[:split], chosen_lengths, None if collision is None else collision[:split]),
            ResponseLogps(values[split:], rejected_lengths, None if collision is None else collision[split:]),
        )

    def _score(self, batch: ModelInputs, with_squared_probs: bool) -> tuple[Tensor, Tensor | None]:
        batch = self._padded(batch)
        return self._logps(batch, self._hidden_states(batch), with_squared_probs)

    def _compute_chunk(
        self, chunk: Chunk, batch: ModelInputs, entering: Tensor | None, with_squared_probs: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch = self._padded(batch)
        with chunk.alone(self.backbone):
            hidden = self._hidden_states(batch, entering)
        if chunk.is_last:
            return self._logps(batch, hidden, with_squared_probs)
        return hidden.to(self.stored_dtype).contiguous(), None

    def _padded(self, batch: ModelInputs) -> ModelInputs:
        return batch if self.context_parallel is None else pad_to_multiple(batch, self.context_parallel.size)

    def _logps(self, batch: ModelInputs, hidden: Tensor, with_squared_probs: bool) -> tuple[Tensor, Tensor | None]:
        rows, places = self._scored_states(batch, hidden)
        targets = batch.targets.to(rows.device)
        head = self.head_for(rows)
        values = target_logps(head, rows, targets if places is None else targets[places])
        collision = log_sum_squared_probs(head, rows) if with_squared_probs else None
        if self.context_parallel is not None and places is not None:
            values = self.context_parallel.all_gather_logps(values, places, len(targets))
            collision = (
                None if collision is None else self.context_parallel.all_gather_logps(collision, places, len(targets))
            )
        return values, collision

    def _hidden_states(self, batch: ModelInputs, entering: Tensor | None = None) -> Tensor:
        """What the decoder makes of a micro-batch, or of the hidden states that earlier layers made of it."""
        device = self.device
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.model_inputs.items()}
        context: dict[str, object] = {}
        if batch.segments is not None:
            # segments reach our attention function through the keyword arguments that transformers hands down
            context["pair_visibility"] = PackedAttention(batch.segments, self.context_parallel)
        if (kept := self._kept(batch)) is not None:
            context["pair_kept"] = KeptRows(kept.rows.to(device), kept.visibility)
        if self.context_parallel is not None:
            inputs = self.context_parallel.shard_inputs(inputs)
        if entering is not None:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = entering
        with self.precision(device):
            hidden: Tensor = self.backbone(**inputs, use_cache=False, **context).last_hidden_state
        return hidden

    def _kept(self, batch: ModelInputs) -> KeptRows | None:
        """The rows that our last layer computes; None where it computes all."""
        return batch.kept if self.skips_unscored_rows and len(batch.scored_rows) else None

    def _scored_states(self, batch: ModelInputs, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The hidden states of scored rows, and which of them these are where another process has the rest."""
        states = hidden.reshape(-1, hidden.shape[-1])
        in_kept = None if self._kept(batch) is None else batch.scored_in_kept
        scored = (batch.scored_rows if in_kept is None else in_kept).to(hidden.device)
        if self.context_parallel is None:
            return states.index_select(0, scored), None
        own, places = self.context_parallel.local_scored_rows(scored, len(states))
        return states.index_select(0, places), own

    def head_for(self, rows: Tensor) -> LMHead:
        """The head as it scores such rows: in our precision, or in fp64 where everything is."""
        compute_dtype = rows.dtype if rows.dtype == torch.float64 else self.compute_dtype
        weight: Tensor = self.head.weight
        bias: Tensor | None = self.head.bias
        transform = logit_transform(self.causal_lm)
        if not isinstance(weight, DTensor):
            return LMHead(weight, bias, compute_dtype, transform)
        share = VocabParallel(first_row(weight), weight.device_mesh.get_group())
        own_bias = bias.to_local() if isinstance(bias, DTensor) else bias
        return LMHead(weight.to_local(), own_bias, compute_dtype, transform, share)

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        if self.compute_dtype == self.stored_dtype:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype)


def _forward_or_score(model: Any, *args: Any, pair_request: Callable[[], Any] | None = None, **rest: Any) -> Any:
    """A causal LM's forward, which also answers a request for logps."""
    return model.original_forward(*args, **rest) if pair_request is None else pair_request()


def first_row(weight: DTensor) -> int:
    """The number of the first row that this process holds of a matrix that is split by rows."""
    _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return int(offsets[0])


def logit_transform(model: nn.Module) -> LogitTransform:
    """Read from a model's config what its family does to logits."""
    config = base_model(model).config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere and others, Falcon-H1
        scale *= float(getattr(config, name, None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)  # Granite; HyperCLOVA X multiplies by it
    scale = scale * divisor if config.model_type == "hyperclovax" else scale / divisor
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))  # Gemma 2


@contextmanager
def original_forward(model: nn.Module) -> Iterator[None]:
    """Let a model compute as its authors wrote it, for the length of a `with` block."""
    plain = base_model(model)
    before = plain.config._attn_implementation
    if before != PAIR_ATTENTION:
        yield
        return
    # not every family has sdpa: the scores of Gemma 2 are capped
    plain.set_attn_implementation("sdpa" if plain._supports_sdpa else "eager")
    try:
        with original_forwards(plain):
            yield
    finally:
        plain.set_attn_implementation(before)


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper (adapters live in its layers and stay active)."""
    unwrap = getattr(model, "get_base_model", None)
    return cast("PreTrainedModel", model if unwrap is None else unwrap())
