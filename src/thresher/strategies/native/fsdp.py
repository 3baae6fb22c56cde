"""The dp_shard axis: FSDP2 shards weights, gradients and optimizer state; with dp_replicate it is HSDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from thresher.models.pipeline_chunk import local_layers


def apply_fsdp(model: PreTrainedModel, mesh: DeviceMesh, compute_dtype: torch.dtype, *, offload: bool = False) -> None:
    """Shard every parameter over the last axis of a mesh; the first of two axes replicates."""
    hint = "use one worker, or set dp_replicate to the number of workers"
    layers = local_layers(model.get_decoder(), "sharding", hint)
    options: dict[str, Any] = {"mesh": mesh}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    stored = next(model.parameters()).dtype
    # layers all-gather their weights in the compute dtype, half the bytes in bf16; embeddings, the final norm, the head
    # and the gradient reduction keep the stored dtype
    layer_options = dict(options)
    if compute_dtype != stored:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=stored, cast_forward_inputs=False)
        layer_options["mp_policy"] = precision
    for layer in layers:
        fully_shard(layer, **layer_options)
    if not model.config.get_text_config().tie_word_embeddings:
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if isinstance(module, nn.Embedding):
                fully_shard(module, **options)
    # FSDP2 keeps the root unsharded after a forward; after an evaluation its weights would be stale in the next step
    fully_shard(model, **options, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is already divided by the pairs of the whole step: sum gradients over ranks, do not average
            module.set_gradient_divide_factor(1.0)
            # a plain sum instead of NCCL's pre-multiplied sum, which gloo lacks
            module.set_force_sum_reduction_for_comms(True)
