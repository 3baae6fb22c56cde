"""Where a model is: how its parameters are split over the processes of a mesh, put together on one page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from thresher.distributed.context_parallel import RowShare
from thresher.distributed.groups import DataRanks, Group
from thresher.distributed.mesh import Mesh
from thresher.models.loading.load_sharded import fill_weights
from thresher.strategies.native.fsdp import shard_model
from thresher.strategies.native.pipeline_parallel import Stage, cut_model
from thresher.strategies.native.tensor_parallel import split_matrices

# a parameter is whole in every process along an axis that does not split it
_SPLITTING_AXES = ("dp_replicate", "shard", "tp")


@dataclass(frozen=True)
class Placement:
    """A process's place among those that train one model.

    coordinates: our place along each axis that can split a parameter; empty where every rank has a whole copy.
    stage: our layers where the model is a pipeline.
    seen_in_part: parameters that every process along tp has whole, and whose gradients there are parts of a sum.
    """

    ranks: DataRanks = field(default_factory=DataRanks)
    row_share: RowShare | None = None
    coordinates: Mapping[str, int] = field(default_factory=dict)
    tp: Group = field(default_factory=Group)
    seen_in_part: frozenset[str] = frozenset()
    stage: Stage | None = None

    def counts(self, parameter: Tensor) -> bool:
        """Say if this process is the one, of all with this part of a parameter, that adds it to a sum or writes it."""
        split = split_axes(parameter)
        places = self.coordinates or {"dp_replicate": self.ranks.rank}
        return all(place == 0 for axis, place in places.items() if axis not in split)


def split_axes(parameter: Tensor) -> set[str]:
    """The axes along which processes hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names or ()
    return {name for name, where in zip(names, parameter.placements, strict=True) if not where.is_replicate()}


def place_model(
    model: PreTrainedModel,
    path: str,
    mesh: Mesh,
    compute_dtype: torch.dtype,
    device: torch.device,
    *,
    offload: bool = False,
    virtual_pp_size: int = 1,
) -> Placement:
    """Split an empty model along every axis of a mesh, then fill what is ours; the order of axes is that of nesting."""
    sizes, devices = mesh.sizes, mesh.device_mesh
    stage = cut_model(model, mesh.group("pp"), virtual_pp_size) if sizes.pp > 1 else None
    seen_in_part = split_matrices(model, devices["tp"]) if sizes.tp > 1 else frozenset()
    if sizes.shards > 1:
        axes = ("dp_replicate", "shard") if sizes.dp_replicate > 1 else "shard"
        shard_model(model, devices[axes], compute_dtype, offload=offload)
    fill_weights(model, path, device)
    return Placement(
        ranks=mesh.ranks(),
        row_share=mesh.row_share(),
        coordinates={axis: mesh.group(axis).rank for axis in _SPLITTING_AXES},
        tp=mesh.group("tp"),
        seen_in_part=seen_in_part,
        stage=stage,
    )
