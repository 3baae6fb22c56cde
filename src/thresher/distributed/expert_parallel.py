"""Expert parallelism: the experts of a layer are split over processes, and rows travel to those of their experts.

    route -> sort by expert -> all-to-all of counts, then rows -> experts -> all-to-all back -> weighted sum

The sum over a row's experts has the order of its router in every process, so it does not depend on their number. The
rows that tensor-parallel processes share are divided among them before, and gathered after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from thresher.distributed.tensors import own_part

# rows and the index of each one's expert among those of this process -> rows
Experts = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ExpertParallel:
    """The processes that split the experts, each with an equal part in order, and those with the same rows."""

    mesh: DeviceMesh
    tp: DeviceMesh | None = None

    def compute(
        self, experts: Experts, rows: Tensor, chosen: Tensor, weights: Tensor, num_local: int, dtype: torch.dtype
    ) -> Tensor:
        """Sum the outputs of each row's experts.

        chosen, weights: [rows, experts per row]. num_local: experts of this process. dtype: of rows on the way.
        """
        if self.tp is None:
            return self._compute(experts, rows, chosen, weights, num_local, dtype)
        own, own_chosen, own_weights = (own_part(each, self.tp, 0) for each in (rows, chosen, weights))
        out = self._compute(experts, own, own_chosen, own_weights, num_local, dtype)
        parts = DTensor.from_local(
            out.contiguous(), self.tp, (Shard(0),), run_check=False, shape=rows.shape, stride=rows.stride()
        )
        whole: Tensor = parts.redistribute(placements=(Replicate(),)).to_local(grad_placements=(Replicate(),))
        return whole.clone()  # not a view, which a layer might add to in place

    def _compute(
        self, experts: Experts, rows: Tensor, chosen: Tensor, weights: Tensor, num_local: int, dtype: torch.dtype
    ) -> Tensor:
        per_row, by_slot = chosen.shape[-1], chosen.reshape(-1)
        order = torch.argsort(by_slot, stable=True)
        counts = by_slot.new_zeros(self.mesh.size() * num_local).scatter_add_(0, by_slot, torch.ones_like(by_slot))
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.mesh.get_group())
        sent, received = read_sizes(torch.stack([counts, coming]).view(2, self.mesh.size(), num_local).sum(-1), by_slot)
        local = torch.arange(num_local, device=rows.device).repeat(self.mesh.size())
        arrived = self._exchange(rows[order // per_row].to(dtype), sent, received)
        out = _compute_any(experts, arrived, local.repeat_interleave(coming, output_size=sum(received)))
        returned = self._exchange(out, received, sent)
        by_row = returned[torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))]
        summed = (by_row.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)
        return summed.to(rows.dtype)

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        moved: Tensor = _Exchange.apply(rows, sent, received, self.mesh.get_group())  # type: ignore[no-untyped-call]
        return moved


def read_sizes(by_process: Tensor, by_slot: Tensor) -> tuple[list[int], list[int]]:  # noqa: ARG001  # a simulation's
    """Read how many rows travel to each process, and from each: the only wait of the host."""
    sent, received = by_process.tolist()
    return sent, received


def _compute_any(experts: Experts, rows: Tensor, chosen: Tensor) -> Tensor:
    """Compute rows of which there may be none: a grouped product needs one, and its weights a gradient of zero."""
    if len(rows):
        return experts(rows, chosen)
    return experts(rows.sum(0, keepdim=True), chosen.new_zeros(1))[:0]


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        ctx.route = received, sent, group
        moved = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(moved, rows.contiguous(), received, sent, group=group)
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back: Tensor = _Exchange.apply(gradient, *ctx.route)  # type: ignore[no-untyped-call]
        return back, None, None, None
