"""Routers of a mixture of experts, and the loss that balances their load.

The loss is Eqs. 4-6 of Switch Transformers (2101.03961), the formula of `load_balancing_loss_func` in transformers:
num_experts * sum_e(share of the tokens routed to e * mean probability of e), over all layers and tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from thresher.distributed.groups import DataParallelGroup, Metrics
from thresher.distributed.tensors import copy_to_device
from thresher.losses.metrics import MetricSum

# model types whose router logits and loss are tested against transformers
FAMILIES = (
    *("gpt_oss", "granitemoe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next"),
    "qwen3_5_moe_text",
)
_ROUTERS = ("gate", "router")
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def num_experts(config: PreTrainedConfig) -> int:
    """Number of experts per layer that a text config names; 0 without any."""
    return next((int(number) for key in _EXPERT_KEYS if (number := getattr(config, key, None))), 0)


def splits_experts(config: PreTrainedConfig) -> bool:
    """Whether the experts of a layer are stacked, so that expert parallelism can split them."""
    plan = getattr(config, "base_model_ep_plan", None) or ()
    return num_experts(config) > 0 and any(name.endswith(".experts") for name in plan)


def routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that choose experts; they stand next to them."""
    for module in model.modules():
        children = dict(module.named_children())
        if "experts" in children:
            yield from (children[name] for name in _ROUTERS if name in children)


@dataclass
class ExpertBalance:
    """The load-balancing loss of a policy, over the tokens of a step; the model adds its rows while a step runs.

    transformers computes that loss per forward, so it depends on the batch. Here the batch is the step: no split into
    micro-batches, layouts and processes changes it. So a step has two passes. The first adds up the load of all
    processes, without gradient. The tokens routed to an expert have no gradient, so the loss is linear in the
    probabilities: the second adds the derivative by them, where a process computes them.
    """

    coef: float
    num_experts: int
    top_k: int
    ranks: DataParallelGroup
    _load: list[Tensor] | None = None  # in the first pass
    _factors: Tensor | None = None  # in the second one: the derivative of the loss by the sums of probabilities

    @property
    def is_active(self) -> bool:
        return self._load is not None or self._factors is not None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add up the load of the rows that are computed within a `with` block; the backward draws the same masks."""
        self._load = []
        try:
            with torch.no_grad(), torch.random.fork_rng():
                yield
        except BaseException:
            self._load = None
            raise

    @contextmanager
    def added(self, loss_scale: float | None, device: torch.device) -> Iterator[Metrics]:
        """Add the loss of the measured rows to that of a `with` block, times loss_scale; collective."""
        # MPS has no fp64
        on = torch.device("cpu") if device.type == "mps" else device
        local = torch.zeros(2 * self.num_experts + 1, dtype=torch.float64, device=on)
        if self._load and self.ranks.adds_rows:
            local += torch.stack(self._load).sum(0).to(on)
        self._load = None
        routed, probabilities, num_tokens = self.ranks.world.sum_vector(local).split([self.num_experts] * 2 + [1])
        factors = self.num_experts * routed / num_tokens.square()
        value = (factors * probabilities).sum()
        scale = self.coef * (1.0 if loss_scale is None else loss_scale)
        self._factors = scale * factors.to(device, torch.float32)
        try:
            yield self.ranks.metrics_group.only_on_rank0({"moe_aux_loss": MetricSum(value, 1.0)})
        finally:
            self._factors = None

    def add(self, hidden: Tensor, router_logits: Sequence[Tensor], row_weights: Tensor) -> Tensor:
        """Add rows that stand for as many tokens as their weights say; hidden: what the loss depends on."""
        weights = copy_to_device(row_weights.to(torch.float32), hidden.device)
        layers = [torch.softmax(logits.reshape(len(weights), -1), dim=-1) for logits in router_logits]
        if not layers:
            return hidden
        probabilities = torch.stack([weights @ layer.float() for layer in layers]).sum(0)
        if self._factors is not None:
            term = (self._factors * probabilities).sum()
            added: Tensor = _AddedToLoss.apply(hidden, term)  # type: ignore[no-untyped-call]
            return added
        assert self._load is not None  # noqa: S101
        routed = torch.zeros_like(probabilities)
        for layer in layers:
            selected = torch.topk(layer, self.top_k, dim=-1).indices
            routed.scatter_add_(0, selected.reshape(-1), weights.repeat_interleave(self.top_k))
        self._load.append(torch.cat([routed, probabilities, weights.sum()[None] * len(layers)]))
        return hidden


class _AddedToLoss(torch.autograd.Function):
    """Return the first argument unchanged; the backward runs as if the second one was added to the loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(term)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (term,) = ctx.saved_tensors
        return gradient, torch.ones_like(term)
