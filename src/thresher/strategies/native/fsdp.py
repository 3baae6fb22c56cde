"""The dp_shard axis: FSDP2 shards weights, gradients and optimizer state; with dp_replicate it is HSDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from thresher.models.pipeline_chunk import local_layers


def apply_fsdp(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    offload: bool = False,
    keeps_gathered: bool = False,
) -> None:
    """Shard every parameter over the last axis of a mesh; the first of two axes replicates.

    keeps_gathered: the matrices of the layers stay gathered between forward and backward (ZeRO-2).
    """
    hint = "use one worker, or set dp_replicate to the number of workers"
    layers = local_layers(model.get_decoder(), "sharding", hint)
    options: dict[str, Any] = {"mesh": mesh}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    stored = next(model.parameters()).dtype
    if not model.config.get_text_config().tie_word_embeddings:
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if isinstance(module, nn.Embedding):
                fully_shard(module, **options)
    # the root also gathers the norms and biases of the layers: FSDP2 casts all parameters of a group alike, and
    # autocast in one process rounds the matrices of a layer but not its norms
    matrices = {parameter for layer in layers for parameter in layer.parameters() if parameter.ndim > 1}
    # FSDP2 keeps the root unsharded after a forward; after an evaluation its weights would be stale in the next step
    fully_shard(model, **options, reshard_after_forward=True, ignored_params=matrices)
    # layers all-gather their matrices in the compute dtype, half the bytes in bf16; all other parameters and the
    # gradient reduction keep the stored dtype
    if compute_dtype != stored:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=stored, cast_forward_inputs=False
        )
    for layer in layers:
        fully_shard(
            layer,
            **options,
            reshard_after_forward=not keeps_gathered,
            ignored_params={p for p in layer.parameters() if p.ndim < 2},
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is already divided by the pairs of the whole step: sum gradients over ranks, do not average
            module.set_gradient_divide_factor(1.0)
            # a plain sum instead of NCCL's pre-multiplied sum, which gloo lacks
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free gathered weights: keeps_gathered keeps them after a forward without a backward, until they are stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
