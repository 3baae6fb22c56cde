"""Trainable parameters of this process: local shards, reduction, norm and scaling of gradients.

The loss is already divided by the pairs of the whole step (see accumulate.py), so every reduction is a sum:

    axis          gradients                                       summed by
    dp_shard, cp  all                                             FSDP2, in every backward or the last one (fsdp.py)
    dp_replicate  all                                             FSDP2 in the last backward if dp_shard or cp > 1,
                                                                  otherwise here
    tp            of replicated parameters, as each rank has a    here
                  partial sum: norms within heads, and all norms
                  with sequence parallelism
    pp            of an embedding tied to the head                here, by the first and the last stage
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thresher.distributed.groups import all_reduce_bucketed
from thresher.distributed.tensors import to_local
from thresher.losses.pairs import to_fp64
from thresher.strategies.native.parallelize import ParallelContext


class LocalParameters:
    """The trainable parameters by name, and this process's shard of each as a plain tensor.

    names: parameter -> name. shards: parameter -> shard, which shares its memory; the parameter itself if it is not a
    DTensor. The optimizer steps on the shards: AdamW is elementwise, so the result does not depend on the sharding.
    """

    def __init__(self, model: nn.Module, base_model: nn.Module, parallel: ParallelContext):
        self._parallel = parallel
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.shards = {p: nn.Parameter(p.to_local()) if isinstance(p, DTensor) else p for p in self.names}
        trained = [(name, p) for name, p in base_model.named_parameters() if p in self.names]
        self._partial_over_tp = [p for name, p in trained if name in parallel.partial_grad_params]
        stage = parallel.stage
        self._tied = [] if stage is None else [p for name, p in trained if name in stage.tied_weights]
        self._owned_by_first_stage: set[Tensor] = set(self._tied) if stage is not None and stage.is_last else set()

    @property
    def by_name(self) -> dict[str, nn.Parameter]:
        return {name: parameter for parameter, name in self.names.items()}

    @property
    def shard_names(self) -> dict[nn.Parameter, str]:
        return {shard: self.names[parameter] for parameter, shard in self.shards.items()}

    def owns(self, parameter: Tensor) -> bool:
        """Whether this process, of all that hold the same shard, adds it to the norm and writes it to checkpoints."""
        return parameter not in self._owned_by_first_stage and self._parallel.owns(parameter)

    def reduce_gradients(self) -> None:
        """Sum the gradients of the step over ranks, once after its last backward, and set them on the shards."""
        for parameter in self.names:
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                # the gradient of an embedding sharded over tp is a partial sum of the full matrix
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        self._parallel.dp_group.all_reduce_gradients(list(self.names))  # does nothing if FSDP2 has summed them
        if self._parallel.tp.size > 1:
            all_reduce_bucketed(_local_gradients(self._partial_over_tp), self._parallel.tp)
        if self._parallel.stage is not None:
            self._parallel.stage.reduce_tied_gradients(_local_gradients(self._tied))
        for parameter, shard in self.shards.items():
            if shard is not parameter:
                shard.grad = None if parameter.grad is None else to_local(parameter.grad)

    def unscale(self, loss_scale: float) -> None:
        """Divide the gradients by the loss scale."""
        self.scale(1.0 / loss_scale)

    def squared_norm(self) -> Tensor | float:
        """The sum of the squares of the gradients that this process owns, in fp64."""
        owned = self._owned_gradients()
        return to_fp64(nn.utils.get_total_norm(owned)).square() if owned else 0.0

    def count_zeros(self) -> Tensor | float:
        """Count the elements of the reduced gradients that this process owns and that are 0."""
        owned = self._owned_gradients()
        return torch.stack([gradient.numel() - gradient.count_nonzero() for gradient in owned]).sum() if owned else 0.0

    def scale(self, factor: float) -> None:
        """Multiply the gradients."""
        if gradients := [p.grad for p in self.shards.values() if p.grad is not None]:
            torch._foreach_mul_(gradients, factor)

    def _owned_gradients(self) -> list[Tensor]:
        return [shard.grad for p, shard in self.shards.items() if shard.grad is not None and self.owns(p)]

    def zero_grad(self) -> None:
        for parameter, shard in self.shards.items():
            parameter.grad = shard.grad = None


def _local_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [to_local(p.grad) for p in parameters if p.grad is not None]
