"""The ep dimension: each process holds whole experts, an equal part of every layer's; FSDP2 shards the rest.

Adapters on experts stay whole like dense parameters: a process adds its experts' part of their product.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from thresher.distributed.expert_parallel import ExpertParallel
from thresher.distributed.tensors import local_slices
from thresher.errors import UserError
from thresher.models.experts import stacks_of

_EXPERTS = (Shard(0),)


def split_experts(model: PreTrainedModel, parallel: ExpertParallel) -> frozenset[str]:
    """Split the experts of a model on the meta device; return the names of parameters with partial gradients over tp.

    Those are the adapters on experts, as each process has the gradient of its experts.
    """
    size, adapters = parallel.mesh.size(), set()
    for outer, inner in list(stacks_of(model)):
        for name, whole in list(inner.named_parameters(recurse=False)):
            if len(whole) % size:  # the check knows the number of the config
                raise UserError(f"ep_size {size} does not divide the {len(whole)} experts of a layer; use a divisor")
            part = DTensor.from_local(whole[: len(whole) // size], parallel.mesh, _EXPERTS, run_check=False)
            inner.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        inner.expert_parallel = parallel  # type: ignore[assignment]
        adapters |= set(outer.parameters()) - set(inner.parameters())
        for wrapper in outer.modules():
            if hasattr(wrapper, "get_delta_factors"):
                wrapper.get_delta_factors = partial(_factors, wrapper, wrapper.get_delta_factors)  # type: ignore[assignment]
    return frozenset(name for name, parameter in model.named_parameters() if parameter in adapters)


def _factors(wrapper: Any, whole_factors: Any, name: str) -> tuple[Tensor, Tensor, float]:
    """Return the factors of this process's experts."""
    matrices = wrapper.get_param()
    left, right, scaling = whole_factors(name)
    experts = local_slices(matrices)[0]
    left, right = (
        DTensor.from_local(each[experts].contiguous(), matrices.device_mesh, matrices.placements, run_check=False)
        for each in (left, right)
    )
    return left, right, scaling
