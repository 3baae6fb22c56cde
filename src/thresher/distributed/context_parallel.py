"""Context parallelism for packed rows (Ulysses): each rank computes one shard of the sequence.

Attention needs the full sequence: one all-to-all turns [all heads, sequence shard] into [head shard, full sequence],
and a second one reverses it. Everything else in a decoder is per token and needs no communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextParallel:
    """One of `size` equal sequence shards of every packed row."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def shard_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.chunk(self.size, dim=1)[self.rank] for name, tensor in inputs.items()}

    def local_scored_rows(self, scored: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the scored rows in this rank's shard, and their row numbers within the shard."""
        rows = scored - self.rank * num_local
        index = ((rows >= 0) & (rows < num_local)).nonzero().squeeze(1)
        return index, rows[index]

    def all_gather_logps(self, values: Tensor, index: Tensor, count: int) -> Tensor:
        """Gather per-token values from all ranks: [local] -> [count]. Gradients reach only the rank that owns a value.

        `index` has the position of each local value in the result.
        """
        full = values.new_zeros(count).index_copy(0, index, values)
        gathered: Tensor = _AllReduceIdentityGrad.apply(full, self.group)  # type: ignore[no-untyped-call]
        return gathered

    def gather_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, heads, rows / size, dim] -> [1, heads / size, rows, dim] of each, in one message."""
        states = (query, self._repeat_kv(key), self._repeat_kv(value))
        # by rank: its heads of queries, keys and values
        shards = [each.reshape(self.size, each.shape[1] // self.size, *each.shape[2:]) for each in states]
        if value.shape[-1] != query.shape[-1]:
            query, key, value = (self._receive(each.contiguous()) for each in shards)
            return query, key, value
        received = self._receive(torch.cat(shards, dim=1))
        query, key, value = received.split([each.shape[1] for each in shards], dim=1)
        return query, key, value

    def gather(self, states: Tensor) -> Tensor:
        """[1, heads, rows / size, ...] -> [1, heads / size, rows, ...]; for layers that carry state along the row."""
        states = self._repeat_kv(states)
        return self._receive(states.reshape(self.size, -1, *states.shape[2:]).contiguous())

    def own(self, values: Tensor) -> Tensor:
        """Return this rank's heads of a parameter: [heads, ...] -> [heads / size, ...]."""
        return values.chunk(self.size)[self.rank]

    def scatter_sequence(self, attended: Tensor) -> Tensor:
        """[1, heads / size, rows, ...] -> [1, heads, rows / size, ...]."""
        _, heads, rows, *dims = attended.shape
        shards = attended.reshape(heads, self.size, rows // self.size, *dims).transpose(0, 1)
        received: Tensor = _AllToAll.apply(shards.contiguous(), self.group)  # type: ignore[no-untyped-call]
        return received.reshape(1, self.size * heads, rows // self.size, *dims)

    def _receive(self, shards: Tensor) -> Tensor:
        """Heads of each rank, [size, heads, rows / size, ...] -> own heads, [1, heads, rows, ...]."""
        size, heads, rows, *dims = shards.shape
        received: Tensor = _AllToAll.apply(shards, self.group)  # type: ignore[no-untyped-call]
        return received.transpose(0, 1).reshape(1, heads, size * rows, *dims)

    def _repeat_kv(self, states: Tensor) -> Tensor:
        """Repeat key/value heads if there are fewer of them than ranks."""
        repeats = self.size // states.shape[1] if states.shape[1] < self.size else 1
        return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)


class _AllToAll(torch.autograd.Function):
    """Send slice i of the first dimension to rank i: [size, ...] -> [size, ...]. It is its own inverse."""

    @staticmethod
    def forward(ctx: Any, shards: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        # functional: selective recomputation keeps results, not buffers that are written to
        splits = [1] * len(shards)
        received = torch.ops._c10d_functional.all_to_all_single(shards, splits, splits, group.group_name)
        result: Tensor = torch.ops._c10d_functional.wait_tensor(received)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad.contiguous(), ctx.group), None  # type: ignore[no-untyped-call]


class _AllReduceIdentityGrad(torch.autograd.Function):
    """All-reduce whose backward is the identity.

    Every rank computes the same loss from the sum, so the gradient of its local addend is already the true one. FSDP2
    then sums the parameter gradients over cp, each token counted once.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None
