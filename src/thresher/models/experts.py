"""Mixtures of experts in mixed precision: experts compute in the compute precision, routers in the stored one.

autocast does not know grouped products, which cast their input to the precision of the weights instead: with weights in
fp32, every expert would compute in fp32, without tensor cores, and compiled layers would fall back to a loop.

With expert parallelism a process computes its own experts for rows of all (distributed/expert_parallel.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from thresher.distributed.expert_parallel import ExpertParallel
from thresher.distributed.tensors import to_local
from thresher.models.optimizations.llama_layers import replace_forward
from thresher.models.router import routers

_IN_COMPUTE_PRECISION = "thresher_grouped_mm"
_MATRICES = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


def use_compute_precision(model: PreTrainedModel) -> None:
    """Let the experts of a model compute in the precision of autocast, and its routers in their stored one."""
    ALL_EXPERTS_FUNCTIONS.register(_IN_COMPUTE_PRECISION, _experts_forward)
    if model.config._experts_implementation == "grouped_mm":
        model.set_experts_implementation(_IN_COMPUTE_PRECISION)
    for router in routers(model):
        replace_forward(router, _router_forward)


def stacks_of(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the stacked experts of each layer: with the adapters around them, and alone."""
    for module in model.modules():
        outer: Any = dict(module.named_children()).get("experts")
        inner = outer.get_base_layer() if hasattr(outer, "get_base_layer") else outer
        if outer is not None and any(map(is_stacked, inner.parameters(recurse=False))):
            yield outer, inner


def is_stacked(parameter: Tensor) -> bool:
    """Whether a parameter has the matrices of all experts of a layer: [experts, rows, columns]."""
    return parameter.ndim == 3


def _experts_forward(experts: Any, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    device = hidden_states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    matrices = {name: to_local(each) for name in _MATRICES if isinstance(each := getattr(experts, name, None), Tensor)}
    rounds = dtype is not None and _are_aligned(matrices, dtype)
    local: Any = _Experts(experts, {name: each.to(dtype) for name, each in matrices.items()} if rounds else matrices)
    parallel: ExpertParallel | None = getattr(experts, "expert_parallel", None)
    if parallel is None:
        out: Tensor = grouped_mm_experts_forward(local, hidden_states, chosen, weights)
        return out

    def compute(rows: Tensor, chosen: Tensor) -> Tensor:
        out: Tensor = grouped_mm_experts_forward(local, rows, chosen[:, None], torch.ones_like(rows[:, :1]))
        return out

    sent_dtype = next(iter(local.matrices.values())).dtype
    return parallel.compute(compute, hidden_states, chosen, weights, local.num_experts, sent_dtype)


def _are_aligned(matrices: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """Whether a grouped product of rounded matrices is possible: its rows must be multiples of 16 bytes."""
    stacked = (each for name, each in matrices.items() if not name.endswith("bias"))
    return all(size * dtype.itemsize % 16 == 0 for each in stacked for size in each.shape[1:])


class _Experts:
    """The experts of this process, with other matrices."""

    def __init__(self, experts: nn.Module, matrices: Mapping[str, Tensor]) -> None:
        self._experts, self.matrices = experts, matrices
        self.num_experts = len(next(iter(matrices.values())))

    def __getattr__(self, name: str) -> Any:
        return self.matrices[name] if name in self.matrices else getattr(self._experts, name)


def _router_forward(router: Any, hidden_states: Tensor, *args: Any, **settings: Any) -> Any:
    dtype = next(router.parameters()).dtype
    with torch.autocast(hidden_states.device.type, enabled=False):
        return type(router).forward(router, hidden_states.to(dtype), *args, **settings)
