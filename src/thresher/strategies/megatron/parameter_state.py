"""The fp32 weight and the moments of a parameter, wherever an optimizer of Megatron-Core keeps them.

The distributed optimizer gives every data-parallel rank a range of the flattened elements, which ignores the rows of
the parameter and may be empty. Checkpoints need the parameter in one piece: one rank gathers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

WEIGHT, STEP = "weight", "step"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class ParameterState:
    """State of one local parameter, split over the ranks of a group.

    main: what the optimizer updates: the parameter, its fp32 copy, or this rank's range of either; None: empty range.
    ranges: elements of the flattened parameter on each rank of the group.
    """

    parameter: nn.Parameter
    main: Tensor | None
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup
    ranges: tuple[range, ...]

    @property
    def is_writer(self) -> bool:
        """Whether `gather` returns the tensor on this rank: the one that already has the most elements."""
        return self.group.rank() == self._writer

    @property
    def _writer(self) -> int:
        sizes = [len(each) for each in self.ranges]
        return sizes.index(max(sizes))

    @property
    def _is_split(self) -> bool:
        return len(self.ranges[self._writer]) < self.parameter.numel()

    @property
    def num_steps(self) -> float | None:
        """Updates so far, for the bias correction of the moments; None before the first. On the writer only."""
        if self.main is None or not (state := self.optimizer.state.get(self.main)):
            return None
        if STEP in state:
            return float(state[STEP])
        # the fused optimizers of Apex and Transformer Engine count per group
        groups = [group for group in self.optimizer.param_groups if any(p is self.main for p in group["params"])]
        return float(groups[0][STEP])

    def gather(self, key: str) -> Tensor | None:
        """Return the weight or a moment in the shape of the parameter, on the writer; collective in the group."""
        local = self._local(key)
        if not self._is_split:
            return None if local is None or not self.is_writer else local.detach().view(self.parameter.shape)
        whole = torch.empty(self.parameter.numel(), dtype=torch.float32, device=self.parameter.device)
        for rank, elements in enumerate(self.ranges):
            if not elements:
                continue
            if rank == self.group.rank():
                assert local is not None  # noqa: S101
                whole[elements.start : elements.stop] = local.detach().view(-1)
                if not self.is_writer:
                    dist.send(local.detach().view(-1).contiguous(), group=self.group, group_dst=self._writer)
            elif self.is_writer:
                received = whole.new_empty(len(elements))
                dist.recv(received, group=self.group, group_src=rank)
                whole[elements.start : elements.stop] = received
        # many parameters are gathered before they are written: not all of them on the device
        return whole.view(self.parameter.shape).cpu() if self.is_writer else None

    @torch.no_grad()
    def assign(self, weight: Tensor, moments: dict[str, Tensor], num_steps: float | None) -> None:
        """Set the parameter and this rank's part of its state from tensors in the shape of the parameter."""
        self.parameter.copy_(weight)
        if self.main is None:
            return
        self.main.copy_(self._part(weight))
        self.optimizer.state.pop(self.main, None)
        if num_steps is None:
            return
        state: dict[str, Any] = {
            key: self._part(moment).to(self.main.device, torch.float32, copy=True) for key, moment in moments.items()
        }
        if isinstance(self.optimizer, torch.optim.AdamW):
            state[STEP] = torch.tensor(num_steps)
        else:
            for group in self.optimizer.param_groups:
                group[STEP] = int(num_steps)
        self.optimizer.state[self.main] = state

    def _part(self, tensor: Tensor) -> Tensor:
        assert self.main is not None  # noqa: S101
        elements = self.ranges[self.group.rank()]
        return tensor.reshape(-1)[elements.start : elements.stop].view(self.main.shape)

    def _local(self, key: str) -> Tensor | None:
        if self.main is None or key == WEIGHT:
            return self.main
        found: Tensor | None = self.optimizer.state.get(self.main, {}).get(key)
        return found


def parameter_states(optimizer: Any, chunks: Sequence[DistributedDataParallel]) -> list[ParameterState]:
    """List the parameters of one optimizer of Megatron-Core, in the order of the model; collective.

    All ranks of a data-parallel group have the same parameters, in the same order.
    """
    is_expert = all(group["is_expert_parallel"] for group in optimizer.param_groups)
    parameters = [
        parameter
        for chunk in chunks
        for parameter in chunk.module.parameters()
        if parameter.requires_grad and getattr(parameter, "allreduce", True) != is_expert
    ]
    group = chunks[0].intra_expt_dp_group if is_expert else chunks[0].intra_dp_cp_group
    mains, local = _main_parameters(optimizer), [range(parameter.numel()) for parameter in parameters]
    of_ranks = [local] * group.size()
    if isinstance(optimizer, DistributedOptimizer):
        local = [_local_range(optimizer, parameter) for parameter in parameters]
        dist.all_gather_object(of_ranks, local, group=group)
    return [
        ParameterState(parameter, mains.get(parameter), optimizer.optimizer, group, ranges)
        for parameter, ranges in zip(parameters, zip(*of_ranks, strict=True), strict=True)
    ]


def _main_parameters(optimizer: Any) -> dict[nn.Parameter, Tensor]:
    """What an optimizer updates, by the parameter of the model."""
    if isinstance(optimizer, DistributedOptimizer):
        places = optimizer.model_param_group_index_map.items()
        return {parameter: optimizer.param_groups[group]["params"][at] for parameter, (group, at) in places}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = [*zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)]
        pairs += zip(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups, strict=True)
        return {model: main for models, mains in pairs for model, main in zip(models, mains, strict=True)}
    return {parameter: parameter for group in optimizer.param_groups for parameter in group["params"]}


def _local_range(optimizer: DistributedOptimizer, parameter: nn.Parameter) -> range:
    if parameter not in optimizer.model_param_gbuf_map:
        return range(0)
    elements = optimizer._get_model_param_range_map(parameter)["param"]
    return range(elements.start, elements.end)
