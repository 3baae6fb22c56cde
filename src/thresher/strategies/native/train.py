"""The native engine: plain torch on one device a rank; parallel axes wrap the model before it gets here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from thresher.checkpoint.collective_save import Write
from thresher.checkpoint.sharded import HostBuffers
from thresher.data.pair import PairBatch
from thresher.losses.objective import Objective
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.models.layouts import Layout
from thresher.models.loading.lora import adapter_disabled
from thresher.models.optimizations.compile import compile_layers
from thresher.strategies.accumulate import LocalStepResult, accumulate_gradients
from thresher.strategies.native.checkpoint import PolicyCheckpoint
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.parallelize import ParallelContext
from thresher.strategies.native.parameters import LocalParameters
from thresher.strategies.nonfinite import NonFiniteStep, find_nonfinite_pairs, nonfinite_reason
from thresher.strategies.strategy import MicroBatch, StepOutcome, TokenCounts


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and clipping; max_grad_norm 0 leaves gradients alone."""

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0


class NativeTrain:
    """A policy in training: one of several equal copies, or the only one."""

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        compute_dtype: torch.dtype,
        optimizer: OptimizerSettings,
        placement: ParallelContext = ParallelContext(),  # noqa: B008  # frozen
    ):
        self.model = model
        self.dp_group = placement.dp_group
        self._infer = NativeInfer(model, layout, compute_dtype, placement)
        self._pair_model = self._infer.pair_model
        self._max_grad_norm = optimizer.max_grad_norm
        self._parameters = LocalParameters(model, self._pair_model.base_model, placement)
        self._optimizer = _adamw(list(self._parameters.shards.values()), optimizer)
        self._files = PolicyCheckpoint(self._parameters, self._optimizer, placement)
        model.train()

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        num_pairs_in_step: int,
        learning_rate: float,
    ) -> StepOutcome:
        """Make one optimizer step; a non-finite loss or gradient leaves weights and optimizer as they were."""
        own = self.accumulate(micro_batches, objective, num_pairs_in_step)
        self._parameters.all_reduce_gradients()
        # from here on every process has the same numbers, and so comes to the same decisions
        metrics, tokens = self.dp_group.metrics_group.all_reduce_metrics(own.metrics, astuple(own.tokens))
        grad_norm = self._parameters.clip(self._max_grad_norm)
        reason, fault = nonfinite_reason(metrics, grad_norm), None
        if reason is not None:
            fault = NonFiniteStep(
                reason, find_nonfinite_pairs(own.seen, self.dp_group, couples_pairs=objective.couples_pairs)
            )
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._parameters.zero_grad()
        return StepOutcome(metrics, grad_norm, TokenCounts(*tokens), fault)

    def compile(self) -> None:
        """Compile the layers; the first step of each kind takes long."""
        compile_layers(self._pair_model.backbone)

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, num_pairs_in_step: int
    ) -> LocalStepResult:
        """Leave this rank's part of the step's gradient in the parameters."""
        return accumulate_gradients(self._infer.passes, micro_batches, objective, num_pairs_in_step, self.dp_group)

    def score(self, batch: PairBatch, *, with_squared_probs: bool = False) -> ChosenRejectedLogps:
        return self._infer.score(batch, with_squared_probs=with_squared_probs)

    def score_base(self, batch: PairBatch) -> ChosenRejectedLogps:
        with adapter_disabled(self.model):
            return self._infer.score(batch)

    def check_logps(self, batch: PairBatch) -> None:
        self._infer.check_logps(batch)

    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for p, name in self._parameters.names.items()}

    @property
    def device(self) -> torch.device:
        return self._pair_model.device

    @property
    def hidden_size(self) -> int:
        return self._pair_model.hidden_size

    @property
    def max_positions(self) -> int | None:
        return self._pair_model.max_positions

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None = None) -> Write:
        return self._files.snapshot(extra, copies)

    def load(self, directory: Path) -> None:
        self._files.load(directory)


def _adamw(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    # norms and biases are not decayed, as everywhere in this field; a part has as many dims as its whole
    decayed = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,  # an empty one as well: every process has the same groups, whatever parameters are there
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
