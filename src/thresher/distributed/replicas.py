"""Gradients of replicas, summed bucket by bucket while the last backward of a step computes the rest of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thresher.distributed.groups import Group
from thresher.distributed.tensors import stack_numbers, to_local

# elements per all-reduce: large enough to saturate a network, small compared with the gradient
_BUCKET_ELEMENTS = 1 << 24
# fp32 copies of gradients; one is on its way while the next one fills
_BUCKETS_IN_FLIGHT = 2


class ReplicaSums:
    """Sums the gradient of every parameter over data-parallel ranks with full copies of the model, in place.

    The loss is already divided by the pairs of the whole step; DistributedDataParallel would average. Buckets and their
    order, from the last parameters to the first, are equal on all ranks, whatever micro-batches a rank has: a bucket
    starts in the last backward as soon as its gradients and all before it are final, and otherwise in `finish`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Group):
        self._parameters, self._ranks = list(parameters), ranks
        by_tensor = dict(zip(map(to_local, self._parameters), self._parameters, strict=True))
        self._buckets = [[by_tensor[tensor] for tensor in bucket] for bucket in _buckets(list(by_tensor))][::-1]
        self._bucket_of = {parameter: at for at, bucket in enumerate(self._buckets) for parameter in bucket}
        self._pending = deque[tuple[list[Tensor], Tensor, dist.Work]]()
        self._holders = torch.zeros(0)  # of each parameter: how many ranks have a gradient; on the device
        self._holders_on_host = self._holders
        self._is_in_step = self._is_last = False
        self._num_started = 0
        self._missing = [len(bucket) for bucket in self._buckets]
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._after_accumulation)

    def begin_step(self) -> None:
        """Let the last backward start sums, which `finish` must follow."""
        self._is_in_step = True

    def before_backward(self, *, is_last: bool) -> None:
        """Say whether the gradients of the next backward are final."""
        self._is_last = is_last

    def finish(self) -> None:
        """Sum what the last backward has not; a rank without a gradient contributes zeros."""
        held = [float(parameter.grad is not None) for parameter in self._parameters]
        while self._num_started < len(self._buckets):
            self._start()
        while self._pending:
            self._take()
        # agreed in each step: rows decide which experts a model of another package computes
        device = to_local(self._parameters[0]).device
        self._holders = self._ranks.sum_vector(stack_numbers(held, device))
        self._holders_on_host = self._holders.to("cpu", non_blocking=True)
        self._is_in_step = self._is_last = False
        self._num_started = 0
        self._missing = [len(bucket) for bucket in self._buckets]

    def drop_unused(self) -> None:
        """Set the gradients to None that no rank has, as in one process: AdamW would apply weight decay.

        The host has read the norm of the gradient before, which the device computes after the copy of the counts.
        """
        for parameter, num_holders in zip(self._parameters, self._holders_on_host.tolist(), strict=True):
            if not num_holders:
                parameter.grad = None

    def is_used(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Whether any rank has a gradient of each parameter; on the device."""
        number = {parameter: at for at, parameter in enumerate(self._parameters)}
        return torch.stack([self._holders[number[each]] > 0 for each in parameters])

    def _after_accumulation(self, parameter: Tensor) -> None:
        if not (self._is_in_step and self._is_last):
            return
        bucket = self._bucket_of[parameter]  # type: ignore[index]
        if bucket < self._num_started:
            raise RuntimeError("the gradient of a parameter has changed after it was summed over replicas")
        self._missing[bucket] -= 1
        while self._num_started < len(self._buckets) and self._missing[self._num_started] <= 0:
            self._start()

    def _start(self) -> None:
        gradients = []
        for parameter in self._buckets[self._num_started]:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            complete(parameter)
            gradients.append(to_local(parameter.grad))
        self._num_started += 1
        flat = _flatten(gradients)
        work = dist.all_reduce(flat, group=self._ranks.group, async_op=True)
        assert work is not None  # noqa: S101
        self._pending.append((gradients, flat, work))
        if len(self._pending) > _BUCKETS_IN_FLIGHT:
            self._take()

    def _take(self) -> None:
        gradients, flat, work = self._pending.popleft()
        work.wait()
        _copy_back(flat, gradients)


def complete(parameter: nn.Parameter) -> None:
    """Sum a gradient over tp if it is partial there: that of an embedding, whose rows are sharded."""
    if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def all_reduce_bucketed(tensors: Sequence[Tensor], group: Group) -> None:
    """Sum every tensor over a group, in place. Small tensors share one all-reduce; sums are fp32 or wider."""
    for bucket in _buckets(tensors):
        flat = _flatten(bucket)
        dist.all_reduce(flat, group=group.group)
        _copy_back(flat, bucket)


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.cat([tensor.reshape(-1).to(wide) for tensor in tensors])


def _copy_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group consecutive tensors of one dtype into buckets of bounded size."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.numel() > _BUCKET_ELEMENTS or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
