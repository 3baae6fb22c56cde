"""A policy's device mesh: the size of each dimension and the process groups that follow from it.

From the outermost in: pp (pipeline stages), dp_replicate (full replicas), dp_shard (FSDP: weights, gradients and
optimizer state), cp (sequence shards), tp (matrix shards). tp is innermost because it communicates most: adjacent ranks
are on the same node.

The experts of a layer have a mesh of their own over the processes of a replica: `ep` splits them, and FSDP shards the
rest (`ep_shard`). So a process of tp or cp is one of these two for experts, and its rows are its own.

Each set of ranks has one communicator, for all dimensions and models of a process: with tp 8 and dp_shard 128, the
groups of shards, of data and of metrics are one. Dimensions of size 1 have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.expert_parallel import ExpertParallel
from thresher.distributed.groups import DataParallelGroup, Group, share_group

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# the dimensions that the processes of a group differ in
_GROUPS = {
    "pp": ("pp",),
    "dp_replicate": ("dp_replicate",),
    "shard": ("dp_shard", "cp"),
    "cp": ("cp",),
    "tp": ("tp",),
    "data": ("dp_replicate", "dp_shard"),
    "metrics": ("pp", "dp_replicate", "dp_shard"),
}


@dataclass(frozen=True)
class ParallelDims:
    """Size of each mesh dimension; the product of all but ep is the number of processes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1  # of dp_shard x cp x tp

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, mesh_dim) for mesh_dim in MESH_DIMS)

    @property
    def num_processes(self) -> int:
        return prod(self.sizes)

    @property
    def num_data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_size(self) -> int:
        """FSDP shards per weight: cp ranks sum gradients as data-parallel ranks do, so both shard weights."""
        return self.dp_shard * self.cp

    @property
    def ep_shard(self) -> int:
        """FSDP shards of the experts of a process."""
        return self.fsdp_size * self.tp // self.ep

    @property
    def uses_fsdp(self) -> bool:
        return self.fsdp_size > 1 or self.ep > 1

    @property
    def is_replicated(self) -> bool:
        """Every process has the full model and full rows."""
        return self.pp == self.fsdp_size == self.tp == 1


@dataclass(frozen=True)
class Mesh:
    """The device mesh, and the process groups of this process."""

    dims: ParallelDims
    groups: Mapping[str, Group]
    device_mesh: DeviceMesh  # pp x dp_replicate x shard x tp, without those of size 1
    expert_mesh: DeviceMesh | None = None  # pp x dp_replicate x ep_shard x ep

    @classmethod
    def create(cls, dims: ParallelDims, device: torch.device) -> Mesh:
        """Create the process groups of every dimension that no mesh of this process has created; a collective call."""
        groups = {name: _group_along(MESH_DIMS, dims.sizes, along) for name, along in _GROUPS.items()}
        outer = {"pp": dims.pp, "dp_replicate": dims.dp_replicate}
        sizes = {**outer, "shard": dims.fsdp_size, "tp": dims.tp}
        # FSDP2 needs a group even if ep leaves nothing to shard, and a mesh needs a dimension
        is_kept = dims.uses_fsdp or dims.num_processes == 1
        mesh = _device_mesh(sizes, device, {"shard"} if is_kept else set())
        if dims.ep == 1:
            return cls(dims, groups, mesh)
        sizes = {**outer, "ep_shard": dims.ep_shard, "ep": dims.ep}
        return cls(dims, groups, mesh, _device_mesh(sizes, device, {"ep_shard"}))

    def data_parallel_group(self) -> DataParallelGroup:
        data = self.group("data")
        return DataParallelGroup(
            data.rank,
            data.size,
            data.group,
            metrics_ranks=self.group("metrics"),
            all_ranks=Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD),
            needs_lockstep=self.dims.uses_fsdp,
            reduces_gradients=not self.dims.uses_fsdp,
            is_writer=all(self.group(mesh_dim).rank == 0 for mesh_dim in ("pp", "cp", "tp")),
            adds_metrics=all(self.group(mesh_dim).rank == 0 for mesh_dim in ("cp", "tp")),
            adds_rows=self.group("tp").rank == 0,
        )

    def fsdp(self) -> DeviceMesh:
        """The mesh of FSDP2: shards, with replicas before them if there are any."""
        return self.device_mesh["dp_replicate", "shard"] if self.dims.dp_replicate > 1 else self.device_mesh["shard"]

    def fsdp_of_experts(self) -> DeviceMesh | None:
        """The mesh of FSDP2 for experts if it is not the one of the rest."""
        if self.expert_mesh is None:
            return None
        has_replicas = self.dims.dp_replicate > 1
        return self.expert_mesh["dp_replicate", "ep_shard"] if has_replicas else self.expert_mesh["ep_shard"]

    def expert_parallel(self) -> ExpertParallel | None:
        if self.expert_mesh is None:
            return None
        return ExpertParallel(self.expert_mesh["ep"], self.device_mesh["tp"] if self.dims.tp > 1 else None)

    def group(self, mesh_dim: str) -> Group:
        return self.groups[mesh_dim]

    def context_parallel(self) -> ContextParallel | None:
        if self.dims.cp == 1:
            return None
        cp = self.group("cp")
        assert cp.group is not None  # noqa: S101
        return ContextParallel(cp.rank, cp.size, cp.group)


def _group_along(names: Sequence[str], sizes: Sequence[int], along: Sequence[str]) -> Group:
    """This process's group of those that differ in some dimensions; without a process group if there is one process."""
    if prod(sizes[names.index(each)] for each in along) == 1:
        return Group()
    group = _share_group_along(names, sizes, along)
    return Group(group.rank(), group.size(), group)


def _share_group_along(names: Sequence[str], sizes: Sequence[int], along: Sequence[str]) -> dist.ProcessGroup:
    dims = [names.index(each) for each in along]
    ranks = np.moveaxis(np.arange(prod(sizes)).reshape(sizes), dims, range(-len(dims), 0))
    subsets = ranks.reshape(-1, prod(sizes[each] for each in dims))
    group = share_group(subsets.tolist(), f"mesh_{'_'.join(along)}")
    assert group is not None  # noqa: S101  # every process is in one
    return group


def _device_mesh(sizes: Mapping[str, int], device: torch.device, kept: Set[str]) -> DeviceMesh:
    """The mesh of the dimensions that have more than one process, and of those that are kept."""
    sizes = {name: size for name, size in sizes.items() if size > 1 or name in kept}
    names, shape = tuple(sizes), tuple(sizes.values())
    groups = [_share_group_along(names, shape, (name,)) for name in names]
    ranks = torch.arange(prod(shape), dtype=torch.int).view(shape)
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=names)
