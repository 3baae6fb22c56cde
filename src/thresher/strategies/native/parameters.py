"""The trainable parameters of a process: what it holds of each, their gradients and their norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thresher.distributed.groups import all_reduce_bucketed
from thresher.distributed.sharded_tensor import to_local
from thresher.strategies.native.parallelize import ParallelContext


class LocalParameters:
    """What this process holds of each trainable parameter: optimizers and norms work on it, knowing no axes.

    A part shares its memory with the parameter it is of. AdamW is a rule for single numbers, so that any split of them
    gives the same step.
    """

    def __init__(self, model: nn.Module, plain: nn.Module, placement: ParallelContext):
        self._placement = placement
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.shards = {p: nn.Parameter(p.to_local()) if isinstance(p, DTensor) else p for p in self.names}
        trained = [(name, p) for name, p in plain.named_parameters() if p in self.names]
        self._summed = [p for name, p in trained if name in placement.partial_grad_params]
        stage = placement.stage
        self._shared = [] if stage is None else [p for name, p in trained if name in stage.tied_weights]
        # of what the first and the last stage of a pipeline share, the first adds it to a norm
        self._counted_elsewhere: set[Tensor] = set(self._shared) if stage is not None and stage.is_last else set()

    @property
    def by_name(self) -> dict[str, nn.Parameter]:
        return {name: whole for whole, name in self.names.items()}

    @property
    def shard_names(self) -> dict[nn.Parameter, str]:
        return {part: self.names[whole] for whole, part in self.shards.items()}

    def owns(self, whole: Tensor) -> bool:
        """Say if this process is the one, of all that hold this part of a parameter, that sums it up or saves it."""
        return whole not in self._counted_elsewhere and self._placement.owns(whole)

    def all_reduce_gradients(self) -> None:
        """Make every gradient that of the whole step, after the last backward, and hand it to the parts."""
        for whole in self.names:
            if isinstance(whole, DTensor) and isinstance(whole.grad, DTensor):
                # that of a split embedding comes as a sum of whole matrices
                whole.grad = whole.grad.redistribute(placements=whole.placements)
        self._placement.dp_group.all_reduce_gradients(list(self.names))
        if self._placement.tp.size > 1:
            gradients = [p.grad for p in self._summed if p.grad is not None]
            all_reduce_bucketed([to_local(gradient) for gradient in gradients], self._placement.tp)
        if self._placement.stage is not None:
            gradients = [p.grad for p in self._shared if p.grad is not None]
            self._placement.stage.reduce_tied_gradients([to_local(gradient) for gradient in gradients])
        for whole, part in self.shards.items():
            if part is not whole:
                part.grad = None if whole.grad is None else to_local(whole.grad)

    def clip(self, max_norm: float) -> float:
        """Scale all gradients to a global norm of at most max_norm, if that is not 0; return what it was."""
        counted = [part.grad for whole, part in self.shards.items() if part.grad is not None and self.owns(whole)]
        own = float(nn.utils.get_total_norm(counted)) if counted else 0.0
        (square,), _ = self._placement.dp_group.world.all_reduce([own**2])
        norm = math.sqrt(square)
        if max_norm and norm > max_norm:
            torch._foreach_mul_([p.grad for p in self.shards.values() if p.grad is not None], max_norm / (norm + 1e-6))
        return norm

    def zero_grad(self) -> None:
        for whole, part in self.shards.items():
            whole.grad = part.grad = None
