"""Mixtures of experts in mixed precision: experts compute in the compute precision, routers in the stored one.

autocast does not know grouped products, which cast their input to the precision of the weights instead: with weights in
fp32, every expert would compute in fp32, without tensor cores, and compiled layers would fall back to a loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

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


def _experts_forward(experts: Any, hidden_states: Tensor, *routing: Tensor) -> Tensor:
    device = hidden_states.device.type
    if torch.is_autocast_enabled(device) and _are_aligned(experts, dtype := torch.get_autocast_dtype(device)):
        experts = _Rounded(experts, dtype)
    out: Tensor = grouped_mm_experts_forward(experts, hidden_states, *routing)
    return out


def _are_aligned(experts: Any, dtype: torch.dtype) -> bool:
    """Whether a grouped product of rounded matrices is possible: its rows must be multiples of 16 bytes."""
    matrices = (getattr(experts, name, None) for name in _MATRICES if not name.endswith("bias"))
    return all(size * dtype.itemsize % 16 == 0 for each in matrices if each is not None for size in each.shape[1:])


class _Rounded:
    """Experts whose matrices are rounded."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        for name in _MATRICES:
            if isinstance(matrix := getattr(experts, name, None), Tensor):
                setattr(self, name, matrix.to(dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def _router_forward(router: Any, hidden_states: Tensor, *args: Any, **settings: Any) -> Any:
    dtype = next(router.parameters()).dtype
    with torch.autocast(hidden_states.device.type, enabled=False):
        return type(router).forward(router, hidden_states.to(dtype), *args, **settings)
