"""A policy's device mesh: the size of each dimension and the process groups that follow from it.

From the outermost in: pp (pipeline stages), dp_replicate (full replicas), dp_shard (FSDP: weights, gradients and
optimizer state), cp (sequence shards), tp (matrix shards). tp is innermost because it communicates most: adjacent ranks
are on the same node.

The experts of a layer have a mesh of their own over the processes of a replica: `ep` splits them, and FSDP shards the
rest (`ep_shard`). So a process of tp or cp is one of these two for experts, and its rows are its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.expert_parallel import ExpertParallel
from thresher.distributed.groups import DataParallelGroup, Group

MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


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
    device_mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None  # ep_shard x ep

    @classmethod
    def create(cls, dims: ParallelDims, device: torch.device) -> Mesh:
        """Create the process groups of every dimension; a collective call."""
        mesh = init_device_mesh(device.type, dims.sizes, mesh_dim_names=MESH_DIMS)
        mesh["dp_replicate", "dp_shard"]._flatten("data")
        mesh["dp_shard", "cp"]._flatten("shard")
        mesh["pp", "dp_replicate", "dp_shard"]._flatten("metrics")
        if dims.ep == 1:
            return cls(dims, mesh)
        experts = mesh["shard"] if dims.tp == 1 else mesh["dp_shard", "cp", "tp"]._flatten("experts")
        return cls(dims, mesh, experts._unflatten(0, (dims.ep_shard, dims.ep), ("ep_shard", "ep")))

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
        shards = self.expert_mesh["ep_shard"]
        if self.dims.dp_replicate == 1:
            return shards
        return DeviceMesh._concatenate([self.device_mesh["dp_replicate"], shards])

    def expert_parallel(self) -> ExpertParallel | None:
        if self.expert_mesh is None:
            return None
        return ExpertParallel(self.expert_mesh["ep"], self.device_mesh["tp"] if self.dims.tp > 1 else None)

    def group(self, mesh_dim: str) -> Group:
        mesh = self.device_mesh[mesh_dim]
        return Group(mesh.get_local_rank(), mesh.size(), mesh.get_group())

    def context_parallel(self) -> ContextParallel | None:
        if self.dims.cp == 1:
            return None
        cp = self.group("cp")
        assert cp.group is not None  # noqa: S101
        return ContextParallel(cp.rank, cp.size, cp.group)
