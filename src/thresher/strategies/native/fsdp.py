"""The dp_shard axis: FSDP2 shards weights, gradients and optimizer state; with dp_replicate it is HSDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from thresher.models.pipeline_chunk import local_layers


@dataclass(frozen=True)
class GradientSync:
    """Tells FSDP2 before every backward whether to reduce the gradients in it.

    Replicas are summed once per step, in the last backward, of shards that earlier ones have reduced. once: shards too
    are reduced only then, of whole gradients that are added up, and the weights stay gathered up to it (ZeRO-1).
    """

    model: FSDPModule
    once: bool = False

    def before_backward(self, *, is_last: bool) -> None:
        if self.once:
            self.model.set_requires_gradient_sync(is_last)
            self.model.set_reshard_after_backward(is_last)
        else:
            self.model.set_requires_all_reduce(is_last)


def apply_fsdp(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    offload: bool = False,
    zero_stage: int = 3,
) -> GradientSync:
    """Shard every parameter over the last axis of a mesh; the first of two axes replicates.

    zero_stage: 2 keeps the matrices of the layers gathered between forward and backward, 1 all parameters.
    """
    hint = "use one worker, or set dp_replicate to the number of workers"
    layers = local_layers(model.get_decoder(), "sharding", hint)
    options: dict[str, Any] = {"mesh": mesh}
    reshards = zero_stage > 1
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    stored = next(model.parameters()).dtype
    if not model.config.get_text_config().tie_word_embeddings:
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if isinstance(module, nn.Embedding):
                fully_shard(module, **options, reshard_after_forward=reshards)
    # the root also gathers the norms and biases of the layers: FSDP2 casts all parameters of a group alike, and
    # autocast in one process rounds the matrices of a layer but not its norms
    matrices = {parameter for layer in layers for parameter in layer.parameters() if parameter.ndim > 1}
    # by default FSDP2 keeps the root unsharded after a forward
    sharded = fully_shard(model, **options, reshard_after_forward=reshards, ignored_params=matrices)
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
            reshard_after_forward=zero_stage == 3,
            ignored_params={p for p in layer.parameters() if p.ndim < 2},
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is already divided by the pairs of the whole step: sum gradients over ranks, do not average
            module.set_gradient_divide_factor(1.0)
            # a plain sum instead of NCCL's pre-multiplied sum, which gloo lacks
            module.set_force_sum_reduction_for_comms(True)
    return GradientSync(sharded, once=zero_stage == 1)


def reshard(model: nn.Module) -> None:
    """Free gathered weights: ZeRO-1 and 2 keep them after a forward without a backward, until they are stale."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
