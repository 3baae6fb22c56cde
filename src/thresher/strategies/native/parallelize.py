"""Apply every parallel axis to a model: pipeline stages, tensor parallelism, FSDP2, then load the local shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.groups import DataParallelGroup, Group
from thresher.distributed.mesh import Mesh
from thresher.models.loading.load_sharded import allocate, load_local_shards
from thresher.strategies.native.fsdp import GradientSync, apply_fsdp
from thresher.strategies.native.pipeline_parallel import PipelineSettings, PipelineStageInfo, keep_stage_layers
from thresher.strategies.native.tensor_parallel import apply_tensor_parallel

# pp is not one of them: a stage holds other parameters, not shards of the same ones
_SHARDING_AXES = ("dp_replicate", "shard", "tp")


@dataclass(frozen=True)
class ParallelContext:
    """The groups and coordinates of this process in the mesh of one model.

    coordinates: index along each axis that can shard a parameter; empty if every rank has a full copy.
    partial_grad_params: parameters replicated over tp whose gradients are partial sums there.
    stage: the layers of this process if the model is a pipeline.
    device: that of computation, if the weights are elsewhere between uses.
    gradient_sync: of FSDP2. num_row_shards: processes of tp that split the rows outside of its matrices.
    """

    dp_group: DataParallelGroup = field(default_factory=DataParallelGroup)
    context_parallel: ContextParallel | None = None
    coordinates: Mapping[str, int] = field(default_factory=dict)
    tp: Group = field(default_factory=Group)
    partial_grad_params: frozenset[str] = frozenset()
    stage: PipelineStageInfo | None = None
    device: torch.device | None = None
    gradient_sync: GradientSync | None = None
    num_row_shards: int = 1
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)

    @property
    def gathers_head(self) -> bool:
        """Whether FSDP2 gathers the weight of the head around its forward, on the stage that has it."""
        return self.gradient_sync is not None and (self.stage is None or self.stage.is_last)

    @property
    def cp_rank(self) -> int:
        return 0 if self.context_parallel is None else self.context_parallel.rank

    def owns(self, parameter: Tensor) -> bool:
        """Whether this process is the first of all that hold the same shard of a parameter."""
        sharded = sharded_axes(parameter)
        coordinates = self.coordinates or {"dp_replicate": self.dp_group.rank}
        return all(index == 0 for axis, index in coordinates.items() if axis not in sharded)


def sharded_axes(parameter: Tensor) -> set[str]:
    """The axes along which processes hold different shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names or ()
    return {name for name, each in zip(names, parameter.placements, strict=True) if not each.is_replicate()}


def parallelize(
    model: PreTrainedModel,
    path: str | None,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    device: torch.device,
    *,
    offload: bool = False,
    zero_stage: int = 3,
    virtual_pp_size: int = 1,
    sequence_parallel: bool = False,
    reduce_dtype: torch.dtype | None = None,
    pipeline: PipelineSettings | None = None,
) -> ParallelContext:
    """Parallelize a model on the meta device along every axis of a mesh, outermost first, and load the local shards.

    path: None allocates the shards only. reduce_dtype: of FSDP2; None is the precision of the weights.
    """
    dims, device_mesh = mesh.dims, mesh.device_mesh
    stage = keep_stage_layers(model, mesh.group("pp"), virtual_pp_size) if dims.pp > 1 else None
    partial_grad_params: frozenset[str] = frozenset()
    if dims.tp > 1:
        partial_grad_params = apply_tensor_parallel(model, device_mesh["tp"], splits_rows=sequence_parallel)
    gradient_sync = None
    if dims.fsdp_size > 1:
        axes = ("dp_replicate", "shard") if dims.dp_replicate > 1 else "shard"
        gradient_sync = apply_fsdp(
            model,
            device_mesh[axes],
            compute_dtype,
            offload=offload,
            zero_stage=zero_stage,
            reduce_dtype=reduce_dtype,
        )
    # FSDP2 requires that the shards which it offloads are on the CPU from the start
    weights_on = torch.device("cpu") if offload else None
    if path is None:
        allocate(model, device, weights_on=weights_on)
    else:
        load_local_shards(model, path, device, weights_on=weights_on, replicas=mesh.group("dp_replicate"))
    return ParallelContext(
        dp_group=mesh.data_parallel_group(),
        context_parallel=mesh.context_parallel(),
        coordinates={axis: mesh.group(axis).rank for axis in _SHARDING_AXES},
        tp=mesh.group("tp"),
        partial_grad_params=partial_grad_params,
        stage=stage,
        device=device,
        gradient_sync=gradient_sync,
        num_row_shards=dims.tp if sequence_parallel else 1,
        pipeline=pipeline or PipelineSettings(),
    )
