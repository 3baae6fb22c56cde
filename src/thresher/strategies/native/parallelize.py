"""Where a model is: how its parameters are split over the processes of a mesh, put together on one page."""

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
from thresher.models.loading.load_sharded import load_local_shards
from thresher.strategies.native.fsdp import apply_fsdp
from thresher.strategies.native.pipeline_parallel import PipelineStageInfo, keep_stage_layers
from thresher.strategies.native.tensor_parallel import apply_tensor_parallel

# a parameter is whole in every process along an axis that does not split it
_SPLITTING_AXES = ("dp_replicate", "shard", "tp")


@dataclass(frozen=True)
class ParallelContext:
    """A process's place among those that train one model.

    coordinates: our place along each axis that can split a parameter; empty where every rank has a whole copy.
    stage: our layers where the model is a pipeline.
    seen_in_part: parameters that every process along tp has whole, and whose gradients there are parts of a sum.
    """

    dp_group: DataParallelGroup = field(default_factory=DataParallelGroup)
    context_parallel: ContextParallel | None = None
    coordinates: Mapping[str, int] = field(default_factory=dict)
    tp: Group = field(default_factory=Group)
    partial_grad_params: frozenset[str] = frozenset()
    stage: PipelineStageInfo | None = None

    def owns(self, parameter: Tensor) -> bool:
        """Say if this process is the one, of all with this part of a parameter, that adds it to a sum or writes it."""
        split = sharded_axes(parameter)
        places = self.coordinates or {"dp_replicate": self.dp_group.rank}
        return all(place == 0 for axis, place in places.items() if axis not in split)


def sharded_axes(parameter: Tensor) -> set[str]:
    """The axes along which processes hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names or ()
    return {name for name, where in zip(names, parameter.placements, strict=True) if not where.is_replicate()}


def parallelize(
    model: PreTrainedModel,
    path: str,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    device: torch.device,
    *,
    offload: bool = False,
    virtual_pp_size: int = 1,
) -> ParallelContext:
    """Split an empty model along every axis of a mesh, then fill what is ours; the order of axes is that of nesting."""
    sizes, devices = mesh.dims, mesh.device_mesh
    stage = keep_stage_layers(model, mesh.group("pp"), virtual_pp_size) if sizes.pp > 1 else None
    partial_grad_params = apply_tensor_parallel(model, devices["tp"]) if sizes.tp > 1 else frozenset()
    if sizes.fsdp_size > 1:
        axes = ("dp_replicate", "shard") if sizes.dp_replicate > 1 else "shard"
        apply_fsdp(model, devices[axes], compute_dtype, offload=offload)
    load_local_shards(model, path, device)
    return ParallelContext(
        dp_group=mesh.data_parallel_group(),
        context_parallel=mesh.context_parallel(),
        coordinates={axis: mesh.group(axis).rank for axis in _SPLITTING_AXES},
        tp=mesh.group("tp"),
        partial_grad_params=partial_grad_params,
        stage=stage,
    )
