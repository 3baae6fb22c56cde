"""Routers of a mixture of experts, and their load: the sums that transformers' load-balancing loss is made of.

The loss is Eqs. 4-6 of Switch Transformers (2101.03961), the formula of `load_balancing_loss_func` in transformers:
num_experts * sum_e(share of the tokens routed to e * mean probability of e), over all layers and the tokens that
predict another one; transformers counts the last token of a sequence too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

# model types whose router logits and loss are tested against transformers
FAMILIES = ("granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")
_ROUTERS = ("gate", "router")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def num_experts(config: PreTrainedConfig) -> int:
    """Number of experts per layer that a text config names; 0 without any."""
    return next((int(number) for key in _EXPERT_KEYS if (number := getattr(config, key, None))), 0)


def routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that choose experts; they stand next to them."""
    for module in model.modules():
        children = dict(module.named_children())
        if "experts" in children:
            yield from (children[name] for name in _ROUTERS if name in children)


class ExpertLoad(NamedTuple):
    """Sums over tokens and layers. routed, probabilities: [num_experts]; only the probabilities have a gradient."""

    routed: Tensor
    probabilities: Tensor
    num_tokens: Tensor

    @classmethod
    def of(cls, router_logits: Sequence[Tensor], row_weights: Tensor, top_k: int) -> ExpertLoad:
        """Add up the layers; each row counts for as many tokens of the batch as its weight says."""
        weights = row_weights.to(router_logits[0].device, torch.float32)
        probabilities = [torch.softmax(logits, dim=-1) for logits in router_logits]
        routed = torch.zeros(probabilities[0].shape[-1], device=weights.device)
        for layer in probabilities:
            selected = torch.topk(layer.detach(), top_k, dim=-1).indices
            routed.scatter_add_(0, selected.reshape(-1), weights.repeat_interleave(top_k))
        total = torch.stack([weights @ layer.float() for layer in probabilities]).sum(0)
        return cls(routed, total, weights.sum() * len(probabilities))

    def of_no_tokens(self) -> ExpertLoad:
        """Load of a dummy batch, on the autograd graph: ZeRO-3 requires the same backward calls on all ranks."""
        return ExpertLoad(*(0 * each for each in self))
