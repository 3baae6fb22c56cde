"""The dp_shard axis: FSDP2 splits weights, gradients and optimizer over ranks and brings a layer's weights together
when it is its turn.

dp_replicate around it makes HSDP: whole groups of shards, with gradients summed between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from thresher.models.pipeline_chunk import local_layers


def apply_fsdp(model: PreTrainedModel, mesh: DeviceMesh, compute_dtype: torch.dtype, *, offload: bool = False) -> None:
    """Split every parameter over the last axis of a mesh; a first axis, if there is one, replicates."""
    mend = "use one worker, or dp_replicate with as many copies as there are workers"
    layers = local_layers(model.get_decoder(), "sharding", mend)
    rest: dict[str, Any] = {"mesh": mesh}
    if offload:
        rest["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    stored = next(model.parameters()).dtype
    # a layer's weights travel as its products take them, half as many bytes in bf16; embeddings, the last norm and the
    # head keep their precision, and so does the sum of gradients
    in_layers: dict[str, Any] = {}
    if compute_dtype != stored:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=stored, cast_forward_inputs=False)
        in_layers["mp_policy"] = precision
    for layer in layers:
        fully_shard(layer, **rest, **in_layers)
    if not model.config.get_text_config().tie_word_embeddings:
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if isinstance(module, nn.Embedding):
                fully_shard(module, **rest)
    # as all others: an evaluation would leave the root's weights whole, and old after the next step
    fully_shard(model, **rest, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is divided by the pairs of the whole step: gradients are summed, not averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
