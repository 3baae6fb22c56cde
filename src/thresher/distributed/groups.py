"""The processes of a policy: which share of the data is ours, and the few things that they do together.

One process is the only rank of one. Nothing is sent then, and no other code can tell the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thresher.distributed.sharded_tensor import to_local
from thresher.losses.metrics import MetricSum
from thresher.losses.pairs import ChosenRejectedLogps, ObjectiveInputs, ResponseLogps

T = TypeVar("T")
Metrics = dict[str, MetricSum]
# numbers in one message: large enough to keep a network busy, small beside the gradient itself
_BUCKET_NUMBERS = 1 << 24


@dataclass(frozen=True)
class Group:
    """Some processes, and which of them we are. A group of one has no process group and sends nothing."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def all_reduce_metrics(self, metrics: Metrics, counts: Sequence[int] = ()) -> tuple[Metrics, list[int]]:
        """Add up metrics and whole numbers, in one message; every process has the same names."""
        if self.size == 1:
            return metrics, list(counts)
        flat = [float(number) for metric in metrics.values() for number in (metric.sum, metric.count)]
        sums, total = self.all_reduce(flat, counts)
        return {
            name: MetricSum(sums[at], sums[at + 1]) for name, at in zip(metrics, range(0, len(sums), 2), strict=True)
        }, total

    def only_on_rank0(self, metrics: Metrics) -> Metrics:
        """Keep what all have measured alike on one of them, so that their sum counts it once."""
        return metrics if self.rank == 0 else {name: MetricSum(0.0, 0.0) for name in metrics}

    def gather_object(self, value: T) -> list[T] | None:
        """Bring one value of every process to the first; None on the others."""
        if self.size == 1:
            return [value]
        values: list[T] | None = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group_dst=0, group=self.group)
        return values

    def broadcast_object(self, value: T) -> T:
        """Give every process the first one's value; those that are not connected keep their own."""
        if self.size == 1 or self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self.group)
        return values[0]

    def all_gather_object(self, value: T) -> list[T]:
        """Give every process the values of all, in the order of the ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def names_on_other_ranks(self, names: Iterable[str]) -> set[str]:
        """Say which names other processes have that this one has not; all take part."""
        own = set(names)
        return {name for theirs in self.all_gather_object(sorted(own)) for name in theirs} - own

    def clone_for_thread(self) -> Group:
        """The same processes on a line of their own: messages of another thread must not mix with those of training."""
        if self.size == 1:
            return self
        members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        return Group(self.rank, self.size, group)

    def all_reduce(self, numbers: Sequence[float], counts: Sequence[int] = ()) -> tuple[list[float], list[int]]:
        """Add up numbers and whole numbers, place by place."""
        if self.size == 1:
            return list(numbers), list(counts)
        # fp64 is exact for whole numbers to 2**53, so counts travel with the rest
        vector = torch.tensor([*numbers, *map(float, counts)], dtype=torch.float64)
        dist.all_reduce(vector, group=self.group)
        sums = vector.tolist()
        return sums[: len(numbers)], [int(number) for number in sums[len(numbers) :]]


SINGLE_PROCESS = Group()


@dataclass(frozen=True)
class DataParallelGroup(Group):
    """`size` data-parallel ranks, each with a share of every step.

    The group connects the processes that differ in their share alone, with gloo for host memory and, on GPUs, NCCL for
    device memory. A rank may be several processes that split its model.

    of_metrics: all data ranks and all stages of a pipeline, of which the last tells the metrics; None: the ranks.
    of_all: every process of the policy; None: the ranks.
    keeps_step: a forward of one rank needs all others, so that all make the same number of them.
    sums_gradients: gradients are left for us to sum, not done by the engine in its backward.
    speaks: of the processes of one rank, we are the one that writes what they all know.
    """

    metrics_ranks: Group | None = None
    all_ranks: Group | None = None
    needs_lockstep: bool = False
    reduces_gradients: bool = True
    is_writer: bool = True

    @property
    def metrics_group(self) -> Group:
        return self.metrics_ranks or self

    @property
    def world(self) -> Group:
        return self.all_ranks or self

    def max_over_ranks(self, count: int) -> int:
        """The largest of the ranks' counts where they must keep step; otherwise our own."""
        if self.size == 1 or not self.needs_lockstep:
            return count
        largest = torch.tensor([count])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def all_reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Leave the sum over all ranks in every gradient: the loss is divided by the pairs of the whole step.

        DistributedDataParallel would average, and reduce inside the one backward that micro-batches do not have.
        """
        if self.size == 1 or not self.reduces_gradients:
            return
        # a parameter that no rank has a gradient of keeps none, as in one process: AdamW would decay it
        holders, _ = self.all_reduce([float(p.grad is not None) for p in parameters])
        gradients = []
        for parameter, num_holders in zip(parameters, holders, strict=True):
            if num_holders:
                # a rank without pairs in this step adds nothing
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.append(to_local(parameter.grad))
        all_reduce_bucketed(gradients, self)

    def all_gather_pairs(self, own: ObjectiveInputs) -> list[ObjectiveInputs]:
        """Give every rank the pairs of all ranks, in the order of the ranks; no gradient passes."""
        if self.size == 1:
            return [own]
        device = own.policy.chosen.values.device
        parts = [self._gather_ragged(tensor) for tensor in _tensors(own)]
        return [_pairs([part[rank].to(device) for part in parts], own) for rank in range(self.size)]

    def _gather_ragged(self, own: Tensor) -> list[Tensor]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([own.numel()]), group=self.group)
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=own.dtype)
        padded[: own.numel()] = own.detach().cpu()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def all_reduce_bucketed(tensors: Sequence[Tensor], over: Group) -> None:
    """Leave the sum over a group in every tensor; many small ones travel as one message, in fp32 at least."""
    for bucket in _buckets(tensors):
        wide = torch.promote_types(bucket[0].dtype, torch.float32)
        flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in bucket])
        dist.all_reduce(flat, group=over.group)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group neighbours of one dtype into messages of bounded size."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.numel() > _BUCKET_NUMBERS or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        yield bucket


def _sides(pairs: ObjectiveInputs) -> list[ResponseLogps]:
    models = [pairs.policy] if pairs.reference is None else [pairs.policy, pairs.reference]
    return [side for model in models for side in (model.chosen, model.rejected)]


def _tensors(pairs: ObjectiveInputs) -> list[Tensor]:
    """Every tensor of some pairs; an absent column is empty. Its inverse is `_pairs`."""
    tensors = []
    for side in _sides(pairs):
        tensors += [side.values, side.lengths]
        tensors += [] if side.log_sum_squared_probs is None else [side.log_sum_squared_probs]
    empty = pairs.policy.chosen.values.new_zeros(0)
    return tensors + [empty if column is None else column for column in (pairs.weight, pairs.margin)]


def _pairs(tensors: list[Tensor], like: ObjectiveInputs) -> ObjectiveInputs:
    remaining = iter(tensors)
    sides = [
        ResponseLogps(next(remaining), next(remaining), None if side.log_sum_squared_probs is None else next(remaining))
        for side in _sides(like)
    ]
    models = [ChosenRejectedLogps(*sides[at : at + 2]) for at in range(0, len(sides), 2)]
    weight, margin = (column if column.numel() else None for column in remaining)
    return ObjectiveInputs(models[0], models[1] if len(models) == 2 else None, weight, margin)
