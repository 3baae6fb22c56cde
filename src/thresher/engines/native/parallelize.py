"""Apply every parallel dimension to a model: pipeline stages, tensor parallelism, FSDP2, then load the local shards.

The first pipeline stage has the embedding, the last one the final norm and the head. Both hold a tied embedding, and
sum its gradient once per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.groups import DataParallelGroup, Group
from thresher.distributed.mesh import Mesh
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.expert_parallel import split_experts
from thresher.engines.native.fsdp import GradientSync, apply_fsdp
from thresher.engines.native.tensor_parallel import apply_tensor_parallel
from thresher.errors import UserError
from thresher.models.loading.load_sharded import Merged, allocate, load_local_shards
from thresher.models.pipeline_chunk import (
    Chunk,
    IdentityModule,
    check_accepts_hidden_states,
    decoder_of,
    head_of,
    remove_head,
)

# not pp: a stage holds different parameters, not shards of the same ones
_SHARDING_DIMS = ("dp_replicate", "shard", "tp")


@dataclass(frozen=True)
class PipelineStageInfo:
    """The pipeline group of this process and its chunks of the model: several for an interleaved schedule."""

    pipeline: Group
    chunks: tuple[Chunk, ...]
    # names of the weights that the first and the last stage both hold
    tied_weights: frozenset[str] = frozenset()

    @property
    def num_chunks(self) -> int:
        """Chunks over all stages."""
        return self.pipeline.size * len(self.chunks)

    @property
    def is_last(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    def reduce_tied_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sum each gradient over the first and the last stage; both get bitwise the same result."""
        peer = 0 if self.is_last else self.pipeline.size - 1
        for gradient in gradients:
            received = torch.empty_like(gradient)
            group = self.pipeline.group
            exchange = [
                dist.P2POp(dist.isend, gradient, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            gradient.add_(received)


@dataclass(frozen=True)
class ParallelContext:
    """The groups and coordinates of this process in one model's mesh."""

    dp_group: DataParallelGroup = field(default_factory=DataParallelGroup)
    context_parallel: ContextParallel | None = None
    # index along each dimension that can shard a parameter; empty if every rank has a full copy
    coordinates: Mapping[str, int] = field(default_factory=dict)
    tp: Group = field(default_factory=Group)
    # parameters replicated over tp whose gradients are partial sums there
    partial_grad_params: frozenset[str] = frozenset()
    # the layers of this process if the model is a pipeline
    stage: PipelineStageInfo | None = None
    # where the model computes, if the weights are elsewhere between uses
    device: torch.device | None = None
    gradient_sync: GradientSync | None = None
    settings: FSDP2Settings = field(default_factory=FSDP2Settings)

    def owns(self, parameter: Tensor) -> bool:
        """Whether this process is the first of all that hold the same shard of a parameter."""
        sharded: set[str] = set()
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            sharded = {name for name, each in zip(names, parameter.placements, strict=True) if not each.is_replicate()}
            if "ep" in sharded:  # over all processes of a replica
                sharded |= {"shard", "tp"}
        coordinates = self.coordinates or {"dp_replicate": self.dp_group.rank}
        return all(index == 0 for mesh_dim, index in coordinates.items() if mesh_dim not in sharded)


def parallelize(
    model: PreTrainedModel,
    path: str | None,
    mesh: Mesh,
    settings: FSDP2Settings,
    compute_dtype: torch.dtype,
    device: torch.device,
    merged: Merged | None = None,
) -> ParallelContext:
    """Parallelize a model on the meta device along every dimension of a mesh, outermost first; load the local shards.

    path: None allocates the shards only.
    """
    dims, device_mesh = mesh.dims, mesh.device_mesh
    stage = _keep_stage_layers(model, mesh.group("pp"), settings.virtual_pp_size) if dims.pp > 1 else None
    partial_grad_params: frozenset[str] = frozenset()
    if dims.tp > 1:
        partial_grad_params = apply_tensor_parallel(
            model, device_mesh["tp"], splits_rows=settings.sequence_parallel, splits_experts=dims.ep == 1
        )
    gradient_sync = None
    if (expert_parallel := mesh.expert_parallel()) is not None:
        partial_grad_params |= split_experts(model, expert_parallel)
    if dims.uses_fsdp:
        gradient_sync = apply_fsdp(model, mesh.fsdp(), compute_dtype, settings, mesh.fsdp_of_experts())
    # FSDP2 requires that the shards which it offloads are on the CPU from the start
    weights_on = torch.device("cpu") if settings.cpu_offload else None
    if path is None:
        allocate(model, device, weights_on=weights_on)
    else:
        replicas = mesh.group("dp_replicate")
        load_local_shards(model, path, device, weights_on=weights_on, replicas=replicas, merged=merged)
    return ParallelContext(
        dp_group=mesh.data_parallel_group(),
        context_parallel=mesh.context_parallel(),
        coordinates={mesh_dim: mesh.group(mesh_dim).rank for mesh_dim in _SHARDING_DIMS},
        tp=mesh.group("tp"),
        partial_grad_params=partial_grad_params,
        stage=stage,
        device=device,
        gradient_sync=gradient_sync,
        settings=settings,
    )


def _keep_stage_layers(model: PreTrainedModel, pipeline: Group, virtual_pp_size: int) -> PipelineStageInfo:
    """Remove the modules of other stages from a model on the meta device; the other parameters keep their names."""
    check_accepts_hidden_states(model)
    decoder = decoder_of(model)
    num_chunks = pipeline.size * virtual_pp_size
    layers = partition_layers(len(decoder.layers), num_chunks)
    chunks = tuple(
        Chunk(index, layers[index], is_last=index == num_chunks - 1)
        for index in range(pipeline.rank, num_chunks, pipeline.size)
    )
    embedding, head = model.get_input_embeddings().weight, head_of(model).weight
    tied = frozenset(name for name, parameter in model.named_parameters() if parameter is embedding is head)
    stage = PipelineStageInfo(pipeline, chunks, tied)
    for number in range(len(decoder.layers)):
        if not any(number in chunk.layers for chunk in chunks):
            decoder.layers[number] = IdentityModule()
    if not stage.is_last:
        decoder.norm = IdentityModule()
        remove_head(model)
        # the head that the embedding is tied to is on the last stage
        model._tied_weights_keys = {}
    if not (pipeline.rank == 0 or (stage.is_last and tied)):
        model.set_input_embeddings(IdentityModule())
    return stage


def partition_layers(num_layers: int, num_chunks: int) -> list[range]:
    """Partition layers into chunks of nearly equal size.

    Extra layers go to the middle chunks, since the first also has the embedding and the last the head.
    """
    if num_layers < num_chunks:
        raise UserError(
            f"{num_layers} layers cannot be split into {num_chunks} pipeline chunks; lower pp_size or virtual_pp_size"
        )
    sizes = [num_layers // num_chunks] * num_chunks
    for index in [*range(1, num_chunks - 1), 0][: num_layers % num_chunks]:
        sizes[index] += 1
    return [range(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]
