"""The dp_shard dimension: FSDP2 shards weights, gradients and optimizer state; with dp_replicate it is HSDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from thresher.distributed.tensors import to_local
from thresher.engines.native.declaration import FSDP2Settings
from thresher.models.experts import is_stacked, stacks_of
from thresher.models.loading.trained import widest_dtype
from thresher.models.pipeline_chunk import decoder_of, head_of, local_layers
from thresher.models.router import routers


@dataclass(frozen=True)
class GradientSync:
    """Tells FSDP2 before every backward whether to reduce the gradients in it.

    Replicas are summed once per step, in the last backward, of shards that earlier ones have reduced.
    """

    model: FSDPModule
    # shards too are reduced only then, of whole gradients that are added up, and the weights stay gathered up to it
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
    settings: FSDP2Settings,
    expert_mesh: DeviceMesh | None = None,
) -> GradientSync:
    """Shard every parameter over the last dimension of a mesh; the first of two replicates.

    With expert parallelism experts have a mesh of their own, and their gradients are summed over it alone.
    ZeRO-2 keeps the matrices of the layers gathered between forward and backward, ZeRO-1 all parameters.
    """
    zero_stage = settings.zero_stage
    hint = "use one worker, or set dp_replicate to the number of workers"
    layers = local_layers(decoder_of(model), "sharding", hint)
    options = _on(mesh)
    if settings.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    stored = widest_dtype(model)
    # of the gradients of matrices
    reduce_dtype = torch.bfloat16 if settings.reduce_dtype == "bf16" else stored
    groups = [*_outer_groups(model, zero_stage), *(_Group([layer], zero_stage == 3) for layer in layers)]
    if expert_mesh is not None:
        experts = list(stacks_of(model))
        groups = [replace(group, left_out=[inner for _, inner in experts]) for group in groups]
        groups += [_Group([outer], zero_stage == 3, only=inner, mesh=expert_mesh) for outer, inner in experts]
    # the root gathers norms, biases and routers in the stored dtype: FSDP2 casts a whole group of parameters, and
    # one process rounds the matrices of a layer but not these. By default it stays unsharded after a forward
    sharded = fully_shard(
        model,
        **options,
        reshard_after_forward=zero_stage > 1,
        ignored_params={matrix for group in groups for matrix in group.matrices},
    )
    for group in groups:
        if compute_dtype != stored:
            # half the bytes in bf16; the head rounds its factors itself, and the embedding starts the residual stream
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=compute_dtype if group.is_rounded else None,
                reduce_dtype=reduce_dtype,
                cast_forward_inputs=False,
            )
        fully_shard(
            group.modules if len(group.modules) > 1 else group.modules[0],
            **(options if group.mesh is None else options | _on(group.mesh)),
            reshard_after_forward=group.reshards_after_forward,
            ignored_params=group.parameters - group.matrices,
        )
        group.modules[0].set_unshard_in_backward(group.needs_weight_in_backward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is already divided by the pairs of the whole step: sum gradients over ranks, do not average
            module.set_gradient_divide_factor(1.0)
            # a plain sum instead of NCCL's pre-multiplied sum, which gloo lacks
            module.set_force_sum_reduction_for_comms(True)
    return GradientSync(sharded, once=zero_stage == 1)


def _on(mesh: DeviceMesh) -> dict[str, Any]:
    return {"mesh": mesh, "shard_placement_fn": partial(_placement, mesh)}


def _placement(mesh: DeviceMesh, parameter: nn.Parameter) -> Shard:
    return Shard(sharded_dim(parameter, mesh.size(-1)))


def sharded_dim(parameter: nn.Parameter, shards: int) -> int:
    """Shard stacked experts by their columns if there are not as many experts for each process.

    Not by rows: those of gate and up are stored apart, and joined when they are read.
    """
    shape = to_local(parameter).shape
    by_columns = is_stacked(parameter) and shape[0] % shards and not shape[-1] % shards
    return len(shape) - 1 if by_columns else 0


@dataclass(frozen=True)
class _Group:
    """Modules whose matrices FSDP2 gathers together; is_rounded: in the compute dtype."""

    modules: list[Any]
    reshards_after_forward: bool
    needs_weight_in_backward: bool = True
    is_rounded: bool = True
    left_out: Sequence[nn.Module] = ()
    only: nn.Module | None = None  # whose matrices are gathered; None: of all modules
    mesh: DeviceMesh | None = None  # if it is another one than the model's

    @property
    def parameters(self) -> set[nn.Parameter]:
        return {parameter for module in self.modules for parameter in module.parameters()}

    @property
    def matrices(self) -> set[nn.Parameter]:
        """Without those of routers, which compute in the stored dtype."""
        if self.only is not None:
            return set(self.only.parameters())
        kept = [*self.left_out, *(router for module in self.modules for router in routers(module))]
        matrices = {parameter for parameter in self.parameters if parameter.ndim > 1}
        return matrices - {parameter for module in kept for parameter in module.parameters()}


def _outer_groups(model: PreTrainedModel, zero_stage: int) -> list[_Group]:
    """The embedding and the head; together if they share their matrix.

    The backward of an embedding reads no weight. The head's backward follows its forward, so it stays gathered.
    """
    embedding, head = model.get_input_embeddings(), head_of(model)
    # a trained copy of them belongs to the same group
    has_embedding = isinstance(getattr(embedding, "original_module", embedding), nn.Embedding)
    has_head = isinstance(getattr(head, "original_module", head), nn.Linear)
    if has_embedding and has_head and embedding.weight is head.weight:
        return [_Group([embedding, head], reshards_after_forward=False, is_rounded=False)]
    groups = []
    if has_embedding:
        groups.append(_Group([embedding], zero_stage > 1, needs_weight_in_backward=False, is_rounded=False))
    if has_head:
        groups.append(_Group([head], reshards_after_forward=False, is_rounded=False))
    return groups
