"""The one mesh of a policy: how many processes each axis has, and which groups of processes follow from them.

Axes from the outside in: pp (stages of a pipeline), dp_replicate (whole copies), dp_shard (ranks that split weights,
gradients and optimizer), cp (parts of a row), tp (parts of every matrix). Neighbours along tp talk most and have
neighbouring numbers, so that they sit on one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.groups import DataParallelGroup, Group

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """Processes along each axis; their product is the number of processes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_processes(self) -> int:
        return prod(self.sizes)

    @property
    def num_data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_size(self) -> int:
        """Processes over which each weight is split, beside tp: parts of a row sum gradients as data ranks do."""
        return self.dp_shard * self.cp

    @property
    def is_replicated(self) -> bool:
        """Every process has a whole model and whole rows."""
        return self.pp == self.fsdp_size == self.tp == 1


@dataclass(frozen=True)
class Mesh:
    """The groups that this process is in."""

    dims: ParallelDims
    device_mesh: DeviceMesh

    @classmethod
    def create(cls, sizes: ParallelDims, device: torch.device) -> Mesh:
        """Make the groups of every axis; all processes take part."""
        mesh = init_device_mesh(device.type, sizes.sizes, mesh_dim_names=AXES)
        mesh["dp_replicate", "dp_shard"]._flatten("data")
        mesh["dp_shard", "cp"]._flatten("shard")
        mesh["pp", "dp_replicate", "dp_shard"]._flatten("metrics")
        return cls(sizes, mesh)

    def data_parallel_group(self) -> DataParallelGroup:
        data = self.group("data")
        return DataParallelGroup(
            data.rank,
            data.size,
            data.group,
            metrics_ranks=self.group("metrics"),
            all_ranks=Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD),
            needs_lockstep=self.dims.fsdp_size > 1,
            reduces_gradients=self.dims.fsdp_size == 1,
            is_writer=all(self.group(axis).rank == 0 for axis in ("pp", "cp", "tp")),
        )

    def group(self, axis: str) -> Group:
        mesh = self.device_mesh[axis]
        return Group(mesh.get_local_rank(), mesh.size(), mesh.get_group())

    def context_parallel(self) -> ContextParallel | None:
        if self.dims.cp == 1:
            return None
        parts = self.group("cp")
        assert parts.group is not None  # noqa: S101
        return ContextParallel(parts.rank, parts.size, parts.group)
