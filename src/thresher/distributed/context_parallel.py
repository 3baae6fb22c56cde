"""Context parallelism on packed rows: every process computes a part of the row, and attention sees the whole (Ulysses).

A process has all heads of its part of the row. For attention the parts are traded by one all-to-all, so that it has the
whole row of its part of the heads, and back. Everything else in a decoder works row by row and needs no other part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ContextParallel:
    """One of `size` equal parts of every packed row."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def shard_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.chunk(self.size, dim=1)[self.rank] for name, tensor in inputs.items()}

    def local_scored_rows(self, scored: Tensor, num_own: int) -> tuple[Tensor, Tensor]:
        """Which of the scored rows are ours, and their places in our part."""
        places = scored - self.rank * num_own
        own = ((places >= 0) & (places < num_own)).nonzero().squeeze(1)
        return own, places[own]

    def all_gather_logps(self, values: Tensor, own: Tensor, count: int) -> Tensor:
        """Give every process the values of all: [own] -> [count]. A gradient goes to whose value it is."""
        whole = values.new_zeros(count).index_copy(0, own, values)
        joined: Tensor = _SumAlike.apply(whole, self.group)  # type: ignore[no-untyped-call]
        return joined

    def gather_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._trade(query), self._trade(self._enough(key)), self._trade(self._enough(value))

    def scatter_sequence(self, attended: Tensor) -> Tensor:
        """[1, heads / size, rows, dim] -> [1, heads, rows / size, dim]."""
        _, heads, rows, dim = attended.shape
        parts = attended.reshape(heads, self.size, rows // self.size, dim).transpose(0, 1)
        traded: Tensor = _AllToAll.apply(parts.contiguous(), self.group)  # type: ignore[no-untyped-call]
        return traded.reshape(1, self.size * heads, rows // self.size, dim)

    def _trade(self, states: Tensor) -> Tensor:
        """[1, heads, rows / size, dim] -> [1, heads / size, rows, dim]."""
        _, heads, rows, dim = states.shape
        parts = states.reshape(self.size, heads // self.size, rows, dim)
        traded: Tensor = _AllToAll.apply(parts.contiguous(), self.group)  # type: ignore[no-untyped-call]
        return traded.transpose(0, 1).reshape(1, heads // self.size, self.size * rows, dim)

    def _enough(self, states: Tensor) -> Tensor:
        """Repeat heads of keys or values where there are fewer of them than parts."""
        repeats = self.size // states.shape[1] if states.shape[1] < self.size else 1
        return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)


class _AllToAll(torch.autograd.Function):
    """Part i of the first dimension goes to process i: [size, ...] -> [size, ...]; its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad.contiguous(), ctx.group), None  # type: ignore[no-untyped-call]


class _SumAlike(torch.autograd.Function):
    """A sum over processes that all go on with it in the same way: each one's gradient is whole already."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad, None
