"""Per-token logps of pairs: the one forward that training, evaluation and the reference share.

Only rows that predict scored tokens reach the LM head, and their full logits are never in memory (see lm_head.py).
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
from transformers import PreTrainedModel

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.sharded_tensor import local_slices, to_local
from thresher.losses.pairs import ChosenRejectedLogps, ResponseLogps
from thresher.models.attention.interface import PAIR_ATTENTION, register_pair_attention
from thresher.models.attention.segments import KeptRows, PackedAttention
from thresher.models.layouts import Layout, ModelInputs
from thresher.models.layouts.packed import pad_to_multiple
from thresher.models.lm_head import LMHead, LogitTransform, VocabParallel, log_sum_squared_probs, target_logps
from thresher.models.optimizations.last_layer import skip_unscored_rows
from thresher.models.optimizations.memory_efficient_layers import original_forwards, use_memory_efficient_layers
from thresher.models.pipeline_chunk import Chunk


@dataclass(frozen=True)
class PairModel:
    """A causal LM that scores pairs; create one with `for_layout`, which prepares the model.

    skips_unscored_rows: the last layer computes only the rows that `ModelInputs.kept` lists.
    context_parallel: the sequence shard of every packed row that this process computes; None: full rows.
    """

    causal_lm: nn.Module
    compute_dtype: torch.dtype
    skips_unscored_rows: bool = False
    context_parallel: ContextParallel | None = None

    @classmethod
    def for_layout(
        cls,
        causal_lm: nn.Module,
        compute_dtype: torch.dtype,
        layout: Layout,
        context_parallel: ContextParallel | None = None,
    ) -> PairModel:
        """Attach the pair forward and, for packed rows, their attention and the optimizations that the model allows."""
        model = base_model(causal_lm)
        attach_pair_forward(model)
        if not layout.needs_pair_attention:
            return cls(causal_lm, compute_dtype)
        register_pair_attention()
        model.set_attn_implementation(PAIR_ATTENTION)
        use_memory_efficient_layers(model.get_decoder())
        # the rows to keep are numbered in the full row, so a sequence shard computes all of its rows
        skips_rows = context_parallel is None and skip_unscored_rows(model.get_decoder())
        return cls(causal_lm, compute_dtype, skips_rows, context_parallel)

    @property
    def base_model(self) -> PreTrainedModel:
        return base_model(self.causal_lm)

    @property
    def backbone(self) -> nn.Module:
        decoder: nn.Module = self.base_model.get_decoder()
        return decoder

    @property
    def device(self) -> torch.device:
        return next(self.causal_lm.parameters()).device

    @property
    def stored_dtype(self) -> torch.dtype:
        """Precision of the weights and of the residual stream."""
        return next(self.base_model.parameters()).dtype

    @property
    def hidden_size(self) -> int:
        return int(self.base_model.config.get_text_config().hidden_size)

    def score(self, batch: ModelInputs, *, with_squared_probs: bool = False) -> ChosenRejectedLogps:
        """Score the response tokens of a micro-batch, with gradients unless the caller disables them."""
        return self.split_sides(batch, *self.base_model(pair_request=partial(self._score, batch, with_squared_probs)))

    def compute_chunk(
        self, chunk: Chunk, batch: ModelInputs, entering: Tensor | None, with_squared_probs: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layers of a chunk: hidden states or, for the last chunk, the arguments of `split_sides`.

        entering: hidden states of the previous chunk; None for the first.
        """
        request = partial(self._compute_chunk, chunk, batch, entering, with_squared_probs)
        out: tuple[Tensor, Tensor | None] = self.base_model(pair_request=request)
        return out

    def hidden_shape(self, batch: ModelInputs) -> tuple[int, int, int]:
        """Shape of a micro-batch's hidden states in this process, except after a last layer that skips rows."""
        sequences, rows = self._padded(batch).model_inputs["input_ids"].shape
        cp_size = 1 if self.context_parallel is None else self.context_parallel.size
        return sequences, rows // cp_size, self.hidden_size

    def split_sides(self, batch: ModelInputs, values: Tensor, squared_probs: Tensor | None) -> ChosenRejectedLogps:
        """Split per-token values into chosen and rejected; chosen responses come first."""
        chosen_lengths, rejected_lengths = batch.chosen_lengths.to(self.device), batch.rejected_lengths.to(self.device)
        split = int(batch.chosen_lengths.sum())
        return ChosenRejectedLogps(
            ResponseLogps(values[:split], chosen_lengths, None if squared_probs is None else squared_probs[:split]),
            ResponseLogps(values[split:], rejected_lengths, None if squared_probs is None else squared_probs[split:]),
        )

    def _score(self, batch: ModelInputs, with_squared_probs: bool) -> tuple[Tensor, Tensor | None]:
        batch = self._padded(batch)
        return self._logps(batch, self._hidden_states(batch), with_squared_probs)

    def _compute_chunk(
        self, chunk: Chunk, batch: ModelInputs, entering: Tensor | None, with_squared_probs: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch = self._padded(batch)
        with chunk.activate(self.backbone):
            hidden = self._hidden_states(batch, entering)
        if chunk.is_last:
            return self._logps(batch, hidden, with_squared_probs)
        return hidden.to(self.stored_dtype).contiguous(), None

    def _padded(self, batch: ModelInputs) -> ModelInputs:
        return batch if self.context_parallel is None else pad_to_multiple(batch, self.context_parallel.size)

    def _logps(self, batch: ModelInputs, hidden: Tensor, with_squared_probs: bool) -> tuple[Tensor, Tensor | None]:
        states = hidden.reshape(-1, hidden.shape[-1])
        in_kept = None if self._kept_rows(batch) is None else batch.scored_in_kept
        rows = (batch.scored_rows if in_kept is None else in_kept).to(hidden.device)
        targets = batch.targets.to(hidden.device)
        cp, count = self.context_parallel, len(targets)
        if cp is not None:
            index, rows = cp.local_scored_rows(rows, len(states))
            targets = targets[index]
        scored = states.index_select(0, rows)
        head = self._lm_head(scored.dtype)
        values = target_logps(head, scored, targets)
        squared_probs = log_sum_squared_probs(head, scored) if with_squared_probs else None
        if cp is not None:
            values = cp.all_gather_logps(values, index, count)
            squared_probs = None if squared_probs is None else cp.all_gather_logps(squared_probs, index, count)
        return values, squared_probs

    def _hidden_states(self, batch: ModelInputs, entering: Tensor | None = None) -> Tensor:
        """Run the decoder on a micro-batch, or on the hidden states that a previous pipeline stage made of it."""
        device = self.device
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.model_inputs.items()}
        context: dict[str, object] = {}
        if batch.segments is not None:
            # transformers passes unknown keyword arguments down to the attention function
            context["pair_visibility"] = PackedAttention(batch.segments, self.context_parallel)
        if (kept := self._kept_rows(batch)) is not None:
            context["pair_kept"] = KeptRows(kept.rows.to(device), kept.visibility)
        if self.context_parallel is not None:
            inputs = self.context_parallel.shard_inputs(inputs)
        if entering is not None:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = entering
        with self.precision(device):
            hidden: Tensor = self.backbone(**inputs, use_cache=False, **context).last_hidden_state
        return hidden

    def _kept_rows(self, batch: ModelInputs) -> KeptRows | None:
        """Return the rows that the last layer computes; None: all."""
        return batch.kept if self.skips_unscored_rows and len(batch.scored_rows) else None

    def _lm_head(self, hidden_dtype: torch.dtype) -> LMHead:
        """Return this process's shard of the head; it computes in compute_dtype, or in fp64 for fp64 hidden states."""
        head: nn.Linear = self.base_model.get_output_embeddings()
        weight, bias = head.weight, head.bias
        vocab_parallel = None
        if isinstance(weight, DTensor):
            vocab_parallel = VocabParallel(local_slices(weight)[0].start, weight.device_mesh.get_group())
        return LMHead(
            to_local(weight),
            None if bias is None else to_local(bias),
            hidden_dtype if hidden_dtype == torch.float64 else self.compute_dtype,
            logit_transform(self.causal_lm),
            vocab_parallel,
        )

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        if self.compute_dtype == self.stored_dtype:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype)


def attach_pair_forward(model: PreTrainedModel) -> None:
    """Let `model(pair_request=function)` call the function instead of the original forward; idempotent.

    The function then runs inside the model's `__call__`, so that hooks around a forward (FSDP2 gathers the weights in
    one) also run around it. The original forward stays available as `model.original_forward`.
    """
    module: Any = model
    if getattr(module.forward, "__func__", None) is not _pair_forward:
        module.original_forward = module.forward
        module.forward = MethodType(_pair_forward, module)


def _pair_forward(model: Any, *args: Any, pair_request: Callable[[], Any] | None = None, **rest: Any) -> Any:
    return model.original_forward(*args, **rest) if pair_request is None else pair_request()


def logit_transform(model: nn.Module) -> LogitTransform:
    """Read the scale and soft cap of a model's logits from its config."""
    config = base_model(model).config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere and others, Falcon-H1
        scale *= float(getattr(config, name, None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)  # Granite; HyperCLOVA X multiplies by it
    scale = scale * divisor if config.model_type == "hyperclovax" else scale / divisor
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))  # Gemma 2


@contextmanager
def original_forward(model: nn.Module) -> Iterator[None]:
    """Use the model's original layers and attention within a `with` block."""
    transformers_model = base_model(model)
    before = transformers_model.config._attn_implementation
    if before != PAIR_ATTENTION:
        yield
        return
    # sdpa is not available to all: Gemma 2 soft-caps its scores
    transformers_model.set_attn_implementation("sdpa" if transformers_model._supports_sdpa else "eager")
    try:
        with original_forwards(transformers_model):
            yield
    finally:
        transformers_model.set_attn_implementation(before)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a PEFT wrapper; adapters are in its layers and stay active."""
    unwrap = getattr(model, "get_base_model", None)
    return cast("PreTrainedModel", model if unwrap is None else unwrap())
