"""A Megatron-Core GPT model that scores pairs: embedding, layers, and the LM head of all engines.

One process has one model per pipeline stage, or several if stages are virtual.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.tensors import copy_to_device
from thresher.engines.megatron.layers import AttentionContext, decoder_spec
from thresher.engines.megatron.parallel import MegatronGroups
from thresher.engines.megatron.weights import ModelShape, WeightMap
from thresher.losses.pairs import NO_STATISTICS, TokenStatistics
from thresher.models.attention.segments import PackedAttention
from thresher.models.layouts import ModelInputs, pad_to_multiple
from thresher.models.lm_head import LMHead, VocabParallel, logit_transform, score_rows


class MegatronPairModel(GPTModel):  # type: ignore[misc]  # megatron-core is optional
    """One model chunk: the layers of a pipeline stage, or of a virtual one."""

    def __init__(
        self,
        hf_config: PreTrainedConfig,
        shape: ModelShape,
        groups: MegatronGroups,
        config: TransformerConfig,
        device: torch.device,
        virtual_stage: int = 0,
    ):
        sizes = groups.sizes
        ties_embeddings = bool(hf_config.tie_word_embeddings)
        vp_stage = virtual_stage if sizes.virtual_pp > 1 else None
        is_first = groups.pp.rank == 0 and virtual_stage == 0
        is_last = groups.is_last_stage and virtual_stage == sizes.virtual_pp - 1
        with torch.device(device):
            super().__init__(
                config,
                decoder_spec(config, vp_stage, groups.pp.rank),
                vocab_size=shape.vocab_size + -shape.vocab_size % sizes.tp,
                max_sequence_length=0,  # only learned positions need it
                pre_process=is_first,
                post_process=is_last,
                share_embeddings_and_output_weights=ties_embeddings,
                position_embedding_type="none",  # our attention applies the rotary embedding
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
                vp_stage=vp_stage,
            )
            self.hf_rotary = _rotary_embedding(hf_config)
        _mark_shards(self)
        self.groups = groups
        self.logit_transform = logit_transform(hf_config)
        self.weight_map = WeightMap(
            shape,
            groups.tp.rank,
            groups.tp.size,
            groups.ep.rank,
            groups.ep.size,
            get_transformer_layer_offset(config, vp_stage, groups.pp.rank),
            ties_embeddings,
        )

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.parameters()).device
        return device

    def forward(self, batch: ModelInputs, *, statistics: TokenStatistics = NO_STATISTICS) -> Any:
        """Return hidden states [rows, sequences, hidden] or, in the last chunk, scored tokens.

        A chunk that is not the first takes its input from `set_input_tensor`.
        """
        num_rows = batch.model_inputs["input_ids"].shape[1]
        batch = self._padded(batch)
        cp = self._context_parallel(batch)
        inputs = {name: copy_to_device(tensor, self.device) for name, tensor in batch.model_inputs.items()}
        inputs = inputs if cp is None else cp.shard_inputs(inputs)
        hidden = self.embedding(inputs["input_ids"], None) if self.pre_process else None
        hidden = self.decoder(
            hidden, attention_mask=None, attention_bias=self._attention_context(batch, inputs["position_ids"])
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # the head has summed the gradient over the ranks already
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        states = hidden.transpose(0, 1)
        if cp is None:
            states = states[:, :num_rows]  # scored rows are numbered without padding
        return score_rows(
            self._lm_head(hidden.dtype),
            states.reshape(-1, states.shape[-1]),
            batch.scored_rows,
            batch.targets,
            context_parallel=cp,
            statistics=statistics,
        )

    def _context_parallel(self, batch: ModelInputs) -> ContextParallel | None:
        """Return the sequence shard of this process; None: every process computes the full rows.

        The all-to-all needs packed rows. The start-up check scores padded ones, and must not share an error with it.
        """
        return None if batch.segments is None else self.groups.context_parallel

    def _num_row_shards(self, batch: ModelInputs) -> int:
        """Number of shards of every row between attention layers."""
        cp = self._context_parallel(batch)
        return (1 if cp is None else cp.size) * (self.groups.sizes.tp if self.config.sequence_parallel else 1)

    def _padded(self, batch: ModelInputs) -> ModelInputs:
        multiple = self._num_row_shards(batch)
        if batch.segments is not None:
            return pad_to_multiple(batch, multiple)
        extra = -batch.model_inputs["input_ids"].shape[1] % multiple
        inputs = {name: F.pad(tensor, (0, extra)) for name, tensor in batch.model_inputs.items()}
        return replace(batch, model_inputs=inputs) if extra else batch

    def _attention_context(self, batch: ModelInputs, position_ids: Tensor) -> AttentionContext:
        # the angles of all sequences are the same, except in a packed row, which is alone
        cos, sin = self.hf_rotary(torch.empty(0, device=self.device), position_ids[:1])
        visibility = None
        if batch.segments is not None:
            visibility = PackedAttention(batch.segments, self.groups.context_parallel, batch.uses_varlen)
        return AttentionContext(cos, sin, visibility)

    def _lm_head(self, dtype: torch.dtype) -> LMHead:
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        tp, vocab_size = self.groups.tp, self.weight_map.shape.vocab_size
        offset = tp.rank * len(weight)
        if offset + len(weight) > vocab_size:  # the padding is not part of the softmax
            weight = weight[: vocab_size - offset]
        shards = None if tp.size == 1 or tp.group is None else VocabParallel(offset, tp.group)
        return LMHead(weight, None, dtype, self.logit_transform, shards)


def _rotary_embedding(config: PreTrainedConfig) -> nn.Module:
    """Transformers' rotary embedding of a model, which knows every kind of scaling."""
    modeling = vars(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__])
    make = next(value for name, value in modeling.items() if name.endswith("RotaryEmbedding"))
    embedding: nn.Module = make(config)
    return embedding


def _mark_shards(model: nn.Module) -> None:
    """Mark sharded weights, as Megatron-Core does when it initializes them."""
    module: Any
    for module in model.modules():
        is_rows = isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding))
        if (is_rows or isinstance(module, RowParallelLinear)) and module.weight is not None:
            set_tensor_model_parallel_attributes(module.weight, True, 0 if is_rows else 1, 1)
