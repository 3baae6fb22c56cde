"""Process groups, the collectives that training uses, and their time limits.

A single process is a group of size 1: its collectives return their input without communication, so callers need no
special case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thresher.distributed.tensors import copy_to_device, read_numbers, stack_numbers
from thresher.losses.metrics import MetricSum
from thresher.losses.pairs import ObjectiveInputs, map_tensors

# for a peer that hangs; the driver or the launcher notices a dead one immediately
PEER_TIMEOUT = timedelta(minutes=30)
# description of groups whose collectives wait for the disk
BACKGROUND = "background"
_NCCL = getattr(dist, "ProcessGroupNCCL", None)  # torch for CPUs has none

# this process's groups in the current world, by the lowest subset of ranks that was created with each
_created: dict[tuple[int, ...], dist.ProcessGroup | None] = {}


def share_group(subsets: Sequence[Sequence[int]], description: str) -> dist.ProcessGroup | None:
    """Return the process group of the subset of ranks that this process is in, None if it is in none; collective.

    Subsets with the same ranks share one communicator, and all ranks are the world. Subsets are disjoint and equal but
    for a shift, and leave no room for another one, as along dimensions of a mesh: the lowest determines the others, so
    all processes find the same ones.
    """
    world, everyone = dist.group.WORLD, tuple(range(dist.get_world_size()))
    if _created.get(everyone) is not world:
        _created.clear()
        _created[everyone] = world
    by_rank = sorted(sorted(each) for each in subsets)
    lowest = tuple(by_rank[0])
    if lowest not in _created:
        _created[lowest] = _create_group(by_rank, description)
    return _created[lowest]


def _create_group(subsets: list[list[int]], description: str) -> dist.ProcessGroup | None:
    world: Any = dist.group.WORLD
    if world.bound_device_id is not None:  # NCCL's communicator is split on all ranks at once
        return dist.split_group(split_ranks=subsets, timeout=PEER_TIMEOUT, group_desc=description)
    own = next((each for each in subsets if world.rank() in each), None)
    if own is None:
        return None
    group: dist.ProcessGroup = dist.new_group(
        own, timeout=PEER_TIMEOUT, use_local_synchronization=True, group_desc=description
    )
    return group


def limit_collectives(timeout: timedelta, backend_type: type | None = _NCCL) -> None:
    """Set the timeout of NCCL's collectives that start from now on, in all groups of this process.

    NCCL ends a process whose collective exceeds it, and its flight recorder writes the last collectives to a file.
    Gloo's sends and receives ignore a new limit; ranks that wait in them are found by missing progress.
    """
    if backend_type is None or not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc != BACKGROUND:
            for backend in {group._get_backend(device) for device in group._device_types}:
                if isinstance(backend, backend_type):
                    backend._set_default_timeout(timeout)


def is_lost_connection(error: object) -> bool:
    """Return whether a collective or the store failed because another process has ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


T = TypeVar("T")
Metrics = dict[str, MetricSum]


@dataclass(frozen=True)
class Group:
    """A process group and this process's rank in it. A group of size 1 has no process group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def all_reduce_metrics(self, metrics: Metrics, counts: Sequence[int] = ()) -> tuple[Metrics, list[int]]:
        """Sum metrics and integer counts over the group in one all-reduce; metric names must match on all ranks."""
        flat = read_numbers([number for metric in metrics.values() for number in (metric.sum, metric.count)])
        sums, total = self.all_reduce(flat, counts)
        return {
            name: MetricSum(sums[at], sums[at + 1]) for name, at in zip(metrics, range(0, len(sums), 2), strict=True)
        }, total

    def only_on_rank0(self, metrics: Metrics) -> Metrics:
        """Zero the metrics on all ranks but 0, so summing replicated values counts them once."""
        return metrics if self.rank == 0 else {name: MetricSum(0.0, 0.0) for name in metrics}

    def gather_object(self, value: T) -> list[T] | None:
        """Gather one value per rank on rank 0; None on the other ranks."""
        if self.size == 1:
            return [value]
        values: list[T] | None = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group_dst=0, group=self.group)
        return values

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value on every rank; without a process group, return the local value."""
        if self.size == 1 or self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self.group)
        return values[0]

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def names_on_other_ranks(self, names: Iterable[str]) -> set[str]:
        """Return the names that other ranks have and this rank does not; a collective call."""
        local = set(names)
        return set().union(*self.all_gather_object(sorted(local))) - local

    def clone_for_thread(self) -> Group:
        """Create a separate gloo group of the same processes, so collectives of two threads do not interleave.

        One more socket to every rank, so only the first save in the background creates it: its collectives wait for the
        disk while those of training go on.
        """
        if self.size == 1:
            return self
        members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        group = dist.new_group(members, backend="gloo", use_local_synchronization=True, group_desc=BACKGROUND)
        return Group(self.rank, self.size, group)

    def all_reduce(self, numbers: Sequence[float], counts: Sequence[int] = ()) -> tuple[list[float], list[int]]:
        """Sum floats and integer counts elementwise over the group."""
        if self.size == 1:
            return list(numbers), list(counts)
        # fp64 represents integers up to 2**53 exactly, so counts share the all-reduce
        vector = torch.tensor([*numbers, *map(float, counts)], dtype=torch.float64)
        dist.all_reduce(vector, group=self.group)
        sums = vector.tolist()
        return sums[: len(numbers)], [int(number) for number in sums[len(numbers) :]]

    def sum_numbers(self, numbers: Sequence[Tensor | float], device: torch.device) -> list[float]:
        """Sum scalars elementwise over the group in one message between devices; the host waits once, for the sums."""
        sums: list[float] = self.sum_vector(stack_numbers(numbers, device)).cpu().tolist()
        return sums

    def sum_vector(self, vector: Tensor) -> Tensor:
        """Sum a tensor over the group in place, without a wait of the host; return it."""
        if self.size > 1:
            dist.all_reduce(vector, group=self.group)
        return vector


SINGLE_PROCESS = Group()


@dataclass(frozen=True)
class DataParallelGroup(Group):
    """`size` data-parallel ranks, each with a subset of the pairs of every step.

    The group connects processes that hold the same model shard and different data, with gloo for host memory and, on
    GPUs, NCCL for device memory. One data-parallel rank may be several processes (pp, cp, tp).
    """

    # all data-parallel ranks of all pipeline stages; the last stage computes the metrics. None: self
    metrics_ranks: Group | None = None
    all_ranks: Group | None = None  # every process of the policy; None: self
    needs_lockstep: bool = False  # a forward is a collective (FSDP), so all ranks must run the same number of forwards
    reduces_gradients: bool = True  # `ReplicaSums` sums gradients; otherwise the engine's backward has done so
    is_writer: bool = True  # this process writes results on behalf of its data-parallel rank
    adds_metrics: bool = True  # to a step's; other processes of its tp or cp group compute the same
    adds_rows: bool = True  # other processes of its tp group compute the same rows

    @property
    def metrics_group(self) -> Group:
        return self.metrics_ranks or self

    @property
    def world(self) -> Group:
        return self.all_ranks or self

    def max_over_ranks(self, count: int) -> int:
        """Return the largest count of all ranks if they run in lockstep, else the local count."""
        if self.size == 1 or not self.needs_lockstep:
            return count
        largest = torch.tensor([count])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def all_gather_pairs(self, local: ObjectiveInputs) -> list[ObjectiveInputs]:
        """Return the pairs of every rank, in rank order, without gradients."""
        if self.size == 1:
            return [local]
        device = local.policy.chosen.values.device
        on_host = map_tensors(local, lambda tensor: tensor.detach().cpu())
        gathered = self.all_gather_object(on_host)
        return [map_tensors(each, lambda tensor: copy_to_device(tensor, device)) for each in gathered]
