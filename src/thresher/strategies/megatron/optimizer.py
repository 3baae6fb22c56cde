"""Gradient buffers and AdamW of Megatron-Core, one call per part of a step (see step.py).

The loss is already divided by the pairs of the whole step (see accumulate.py), so every reduction is a plain sum. With
`calculate_per_token_loss` Megatron-Core scales nothing by the number of ranks or micro-batches:

    axis      gradients                                    summed by
    dp        all but those of experts                     DistributedDataParallel
    dp / ep   of experts, which see the tokens of ep       DistributedDataParallel
    tp        of replicated parameters with partial sums   finalize_model_grads (norms within heads, sequence parallel)
    pp        of an embedding tied to the head             finalize_model_grads
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import nn

from thresher.strategies.megatron.parameter_state import ParameterState, parameter_states
from thresher.strategies.optimizer import OptimizerSettings

_NOT_DECAYED = ParamKey(predicate=ParamPredicate(name="ndim < 2", fn=lambda parameter: parameter.ndim < 2))


def wrap_chunks(
    chunks: Sequence[nn.Module],
    *,
    use_distributed_optimizer: bool,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
) -> list[DistributedDataParallel]:
    """Give the trainable parameters of every chunk of the model a gradient buffer; gradients are summed in fp32."""
    settings = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": use_distributed_optimizer,
        "overlap_grad_reduce": overlap_grad_reduce,
        "overlap_param_gather": overlap_param_gather,
    }
    config: Any = chunks[0].config
    wrapped = [
        # buckets of later chunks do not overlap with anything
        DistributedDataParallel(config, DistributedDataParallelConfig(**settings), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if overlap_grad_reduce:
        # the backward of the last micro-batch reduces the gradients
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync[0] if len(wrapped) == 1 else no_sync
    return wrapped


class PolicyOptimizer:
    """AdamW over the trainable parameters of this process, or over its share of them among data-parallel ranks."""

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], settings: OptimizerSettings, compute_dtype: torch.dtype
    ):
        self.chunks = list(chunks)
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.epsilon,
            clip_grad=settings.max_grad_norm,
            # 16-bit parameters get fp32 copies, which the optimizer updates; fp16 would bring Megatron's loss scale
            bf16=compute_dtype != torch.float32,
            params_dtype=compute_dtype,
            use_distributed_optimizer=self.chunks[0].ddp_config.use_distributed_optimizer,
            overlap_param_gather=self.chunks[0].ddp_config.overlap_param_gather,
            log_num_zeros_in_grad=settings.counts_zeros,
        )
        self._optimizer = get_megatron_optimizer(
            config, self.chunks, {_NOT_DECAYED: {"wd_mult": 0.0}}, use_gloo_process_groups=False
        )
        for group in self._optimizer.param_groups:
            # Megatron's scheduler, which is not used, would multiply them in every step
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]

    def reduce_gradients(self) -> None:
        """Sum the gradients of the step over ranks, once after its last backward."""
        finalize_model_grads(self.chunks)
        self._optimizer.prepare_grads()

    def count_zeros(self) -> float:
        """Count the elements of the reduced gradients that are 0; Megatron-Core counts those of all processes."""
        return self._once(float(self._optimizer.count_zeros()))

    def unscale(self, loss_scale: float) -> None:
        """Divide the gradients by the loss scale."""
        self.scale(1.0 / loss_scale)

    def squared_norm(self) -> float:
        """The squared norm of the gradients; Megatron-Core sums it over all processes."""
        return self._once(float(self._optimizer.get_grad_norm()) ** 2)

    def scale(self, factor: float) -> None:
        """Multiply the gradients."""
        gradients = [p.grad for each in self._optimizer.chained_optimizers for p in each.get_parameters()]
        if gradients := [gradient for gradient in gradients if gradient is not None]:
            torch._foreach_mul_(gradients, factor)

    def _once(self, total: float) -> float:
        """A number of all processes as the share of one of them."""
        return total if dist.get_rank() == 0 else 0.0

    def step(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step_with_ready_grads()

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def finish_gathering(self) -> None:
        """Gather the parameters that a step with overlap_param_gather leaves to the next forward; collective."""
        if self.chunks[0].ddp_config.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def states(self) -> list[ParameterState]:
        """List the state of every trainable parameter of this process; collective."""
        return [
            state
            for each in self._optimizer.chained_optimizers
            if not each.is_stub_optimizer
            for state in parameter_states(each, self.chunks)
        ]
