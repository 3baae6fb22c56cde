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

from thresher.distributed.context_parallel import RowShare
from thresher.distributed.groups import DataRanks, Group

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class AxisSizes:
    """Processes along each axis; their product is the number of processes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_processes(self) -> int:
        return prod(self.all)

    @property
    def num_data_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Processes over which each weight is split, beside tp: parts of a row sum gradients as data ranks do."""
        return self.dp_shard * self.cp

    @property
    def is_plain(self) -> bool:
        """Every process has a whole model and whole rows."""
        return self.pp == self.shards == self.tp == 1


@dataclass(frozen=True)
class Mesh:
    """The groups that this process is in."""

    sizes: AxisSizes
    device_mesh: DeviceMesh

    @classmethod
    def of(cls, sizes: AxisSizes, device: torch.device) -> Mesh:
        """Make the groups of every axis; all processes take part."""
        mesh = init_device_mesh(device.type, sizes.all, mesh_dim_names=AXES)
        mesh["dp_replicate", "dp_shard"]._flatten("data")
        mesh["dp_shard", "cp"]._flatten("shard")
        mesh["pp", "dp_replicate", "dp_shard"]._flatten("metrics")
        return cls(sizes, mesh)

    def ranks(self) -> DataRanks:
        data = self.group("data")
        return DataRanks(
            data.rank,
            data.size,
            data.group,
            of_metrics=self.group("metrics"),
            of_all=Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD),
            keeps_step=self.sizes.shards > 1,
            sums_gradients=self.sizes.shards == 1,
            speaks=all(self.group(axis).rank == 0 for axis in ("pp", "cp", "tp")),
        )

    def group(self, axis: str) -> Group:
        mesh = self.device_mesh[axis]
        return Group(mesh.get_local_rank(), mesh.size(), mesh.get_group())

    def row_share(self) -> RowShare | None:
        if self.sizes.cp == 1:
            return None
        parts = self.group("cp")
        assert parts.group is not None  # noqa: S101
        return RowShare(parts.rank, parts.size, parts.group)
