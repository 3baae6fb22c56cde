"""Per-token logps of pairs: the one forward that training, evaluation and the reference share.

Only rows that predict scored tokens reach the LM head, and their full logits are never in memory (see lm_head.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.tensors import copy_to_device, local_slices, to_local
from thresher.losses.pairs import NO_STATISTICS, ExampleLogps, TokenStatistics
from thresher.models.attention.interface import PAIR_ATTENTION, register_pair_attention
from thresher.models.attention.segments import KeptRows, PackedAttention
from thresher.models.branching_state import branch_states
from thresher.models.experts import use_compute_precision
from thresher.models.layouts import Layout, ModelInputs, pad_to_multiple
from thresher.models.lm_head import (
    LMHead,
    RewardHead,
    ScoredTokens,
    VocabParallel,
    logit_transform,
    score_rows,
    split_sides,
)
from thresher.models.loading.load import soft_caps_scores
from thresher.models.loading.trained import widest_dtype
from thresher.models.optimizations.llama_layers import (
    original_forwards,
    skip_unscored_rows,
    use_memory_efficient_layers,
)
from thresher.models.pipeline_chunk import Chunk, decoder_of, head_of
from thresher.models.router import ExpertBalance


@dataclass(frozen=True)
class PairModel:
    """A causal LM that scores pairs; create one with `for_layout`, which prepares the model."""

    causal_lm: nn.Module
    compute_dtype: torch.dtype
    skips_unscored_rows: bool = False  # the last layer computes only the rows that `ModelInputs.kept` lists
    context_parallel: ContextParallel | None = None  # the sequence shard of packed rows; None: full rows
    engine: Callable[..., Any] | None = None  # called instead of the transformers model that it wraps
    # logps are computed inside the head's `__call__`: its weight is gathered only there (FSDP2 and DeepSpeed's ZeRO-3)
    calls_head: bool = False
    compute_device: torch.device | None = None  # None: where the weights are
    num_row_shards: int = 1  # processes that split the rows between layers (sequence parallelism)
    balance: ExpertBalance | None = None  # of a policy with a load-balancing loss
    # of the weights between steps, and of the residual stream; frozen matrices may be narrower
    stored_dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        # read once: FSDP2 gathers matrices in the compute precision, and may keep them so between forwards
        object.__setattr__(self, "stored_dtype", widest_dtype(self.base_model))

    @classmethod
    def for_layout(
        cls,
        causal_lm: nn.Module,
        compute_dtype: torch.dtype,
        layout: Layout,
        context_parallel: ContextParallel | None = None,
        *,
        engine: Callable[..., Any] | None = None,
        calls_head: bool = False,
        device: torch.device | None = None,
        num_row_shards: int = 1,
    ) -> PairModel:
        """Attach the pair forward and, for packed rows, their attention and the optimizations that the model allows."""
        model = base_model(causal_lm)
        attach_pair_forward(model)
        if calls_head:
            attach_pair_forward(head_of(model))
        use_compute_precision(model)
        if not layout.needs_pair_attention:
            return cls(causal_lm, compute_dtype, engine=engine, calls_head=calls_head, compute_device=device)
        register_pair_attention()
        model.set_attn_implementation(PAIR_ATTENTION)
        branch_states(model)
        use_memory_efficient_layers(decoder_of(model))
        # the rows to keep are numbered in the full row, so a sequence shard computes all of its rows
        has_full_rows = context_parallel is None and num_row_shards == 1
        skips_rows = has_full_rows and skip_unscored_rows(decoder_of(model))
        return cls(causal_lm, compute_dtype, skips_rows, context_parallel, engine, calls_head, device, num_row_shards)

    @property
    def base_model(self) -> PreTrainedModel:
        return base_model(self.causal_lm)

    @property
    def backbone(self) -> nn.Module:
        decoder: nn.Module = decoder_of(self.base_model)
        return decoder

    @property
    def device(self) -> torch.device:
        return self.compute_device or next(self.causal_lm.parameters()).device

    @property
    def hidden_size(self) -> int:
        return int(self.base_model.config.get_text_config().hidden_size)

    def score(self, batch: ModelInputs, *, statistics: TokenStatistics = NO_STATISTICS) -> ExampleLogps:
        """Score the response tokens of a micro-batch, with gradients unless the caller disables them."""
        return self.split_sides(batch, self._run(partial(self._score, batch, statistics)))

    def compute_chunk(
        self, chunk: Chunk, batch: ModelInputs, entering: Tensor | None, statistics: TokenStatistics
    ) -> Tensor | ScoredTokens:
        """Compute a chunk's layers from the previous chunk's hidden states; the last chunk returns scored tokens."""
        request = partial(self._compute_chunk, chunk, batch, entering, statistics)
        out: Tensor | ScoredTokens = self._run(request)
        return out

    def hidden_shape(self, batch: ModelInputs) -> tuple[int, int, int]:
        """Shape of a micro-batch's hidden states in this process, except after a last layer that skips rows."""
        sequences, rows = self._padded(batch).model_inputs["input_ids"].shape
        return sequences, rows // self._num_shards, self.hidden_size

    def split_sides(self, batch: ModelInputs, tokens: ScoredTokens) -> ExampleLogps:
        """Split per-token values into chosen and rejected; chosen responses come first."""
        return split_sides(batch, tokens, self.device)

    def _run(self, request: Callable[[], Any]) -> Any:
        """Call a function inside the model's `__call__`."""
        return (self.engine or self.base_model)(pair_request=request)

    def _score(self, batch: ModelInputs, statistics: TokenStatistics) -> ScoredTokens:
        batch = self._padded(batch)
        return self._logps(batch, self._run_backbone(batch), statistics)

    def _compute_chunk(
        self, chunk: Chunk, batch: ModelInputs, entering: Tensor | None, statistics: TokenStatistics
    ) -> Tensor | ScoredTokens:
        batch = self._padded(batch)
        with chunk.activate(self.backbone):
            hidden = self._run_backbone(batch, entering)
        if chunk.is_last:
            return self._logps(batch, hidden, statistics)
        return hidden.to(self.stored_dtype).contiguous()

    def _padded(self, batch: ModelInputs) -> ModelInputs:
        return batch if self._num_shards == 1 else pad_to_multiple(batch, self._num_shards)

    @property
    def _num_shards(self) -> int:
        """Of the hidden states of a packed row."""
        return self.num_row_shards * (1 if self.context_parallel is None else self.context_parallel.size)

    def _logps(self, batch: ModelInputs, hidden: Tensor, statistics: TokenStatistics) -> ScoredTokens:
        request = partial(self._head_logps, batch, statistics)
        if self.calls_head:
            out: ScoredTokens = head_of(self.base_model)(hidden, pair_request=request)
            return out
        return request(hidden)

    def _head_logps(self, batch: ModelInputs, statistics: TokenStatistics, hidden: Tensor) -> ScoredTokens:
        in_kept = None if self._kept_rows(batch) is None else batch.scored_in_kept
        return score_rows(
            self._head(hidden.dtype),
            hidden.reshape(-1, hidden.shape[-1]),
            batch.scored_rows if in_kept is None else in_kept,
            batch.targets,
            context_parallel=self.context_parallel,
            statistics=statistics,
        )

    def _run_backbone(self, batch: ModelInputs, entering: Tensor | None = None) -> Tensor:
        """Run the decoder on a micro-batch, or on the hidden states that a previous pipeline stage made of it."""
        device = self.device
        inputs = {name: copy_to_device(tensor, device) for name, tensor in batch.model_inputs.items()}
        balance = self.balance if self.balance is not None and self.balance.is_active else None
        context: dict[str, object] = {}
        if batch.segments is not None:
            # transformers passes unknown keyword arguments down to the attention function
            context["pair_visibility"] = PackedAttention(batch.segments, self.context_parallel, batch.uses_varlen)
        if (kept := self._kept_rows(batch)) is not None:
            context["pair_kept"] = KeptRows(copy_to_device(kept.rows, device), kept.visibility)
        row_weights = batch.row_weights
        if self.context_parallel is not None:
            inputs = self.context_parallel.shard_inputs(inputs)
            row_weights = row_weights.chunk(self.context_parallel.size)[self.context_parallel.rank]
        if entering is not None:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = entering
        if balance is not None:
            context["output_router_logits"] = True
        with self.precision(device):
            out = self.backbone(**inputs, use_cache=False, **context)
        hidden: Tensor = out.last_hidden_state
        return hidden if balance is None else balance.add(hidden, out.router_logits or (), row_weights)

    def _kept_rows(self, batch: ModelInputs) -> KeptRows | None:
        """Return the rows that the last layer computes; None: all."""
        return batch.kept if self.skips_unscored_rows and len(batch.scored_rows) else None

    @property
    def is_reward_model(self) -> bool:
        return hasattr(self.base_model, "score")

    def _head(self, hidden_dtype: torch.dtype) -> LMHead | RewardHead:
        """Return this process's shard of the head, which computes in fp64 if hidden states are fp64."""
        head: nn.Linear = head_of(self.base_model)
        weight, bias = head.weight, head.bias
        if self.is_reward_model:
            return RewardHead(to_local(weight))
        vocab_parallel = None
        if isinstance(weight, DTensor):
            vocab_parallel = VocabParallel(local_slices(weight)[0].start, weight.device_mesh.get_group())
        return LMHead(
            to_local(weight),
            None if bias is None else to_local(bias),
            hidden_dtype if hidden_dtype == torch.float64 else self.compute_dtype,
            logit_transform(self.base_model.config),
            vocab_parallel,
        )

    def precision(self, device: torch.device) -> AbstractContextManager[object]:
        if self.compute_dtype == self.stored_dtype:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype)

    def trained_weights_cast_once(self) -> AbstractContextManager[object]:
        """Within a `with` block, all forwards use one copy of the trained weights in the compute precision.

        autocast drops its copies at the end of the outermost block; this one casts nothing itself. Otherwise every
        micro-batch in flight has its own copies. With gradient checkpointing copies live for a layer only, and
        an engine may gather the weights for each forward.
        """
        casts = self.compute_dtype != self.stored_dtype
        if not casts or self.engine is not None or self.base_model.is_gradient_checkpointing:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=False)


def attach_pair_forward(model: nn.Module) -> None:
    """Let `model(*args, pair_request=function)` return function(*args) instead of the original forward; idempotent.

    The function then runs inside the model's `__call__`, so hooks around a forward (FSDP2 gathers the weights in one)
    run around it too. The original forward stays available as `model.original_forward`.
    """
    module: Any = model
    if getattr(module.forward, "__func__", None) is not _pair_forward:
        module.original_forward = module.forward
        module.forward = MethodType(_pair_forward, module)


def _pair_forward(model: Any, *args: Any, pair_request: Callable[..., Any] | None = None, **rest: Any) -> Any:
    return model.original_forward(*args, **rest) if pair_request is None else pair_request(*args)


@contextmanager
def original_forward(model: nn.Module) -> Iterator[None]:
    """Use the model's original layers and attention within a `with` block."""
    transformers_model = base_model(model)
    before = transformers_model.config._attn_implementation
    if before != PAIR_ATTENTION:
        yield
        return
    has_sdpa = transformers_model._supports_sdpa and not soft_caps_scores(transformers_model.config)
    transformers_model.set_attn_implementation("sdpa" if has_sdpa else "eager")
    try:
        with original_forwards(transformers_model):
            yield
    finally:
        transformers_model.set_attn_implementation(before)


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a PEFT wrapper; adapters are in its layers and stay active."""
    unwrap = getattr(model, "get_base_model", None)
    return cast("PreTrainedModel", model if unwrap is None else unwrap())
