"""Interface between the trainer and an engine: an engine makes one optimizer step from micro-batches and an objective.

The trainer knows its data-parallel rank; parallel axes and kernels are the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.save import Write
from thresher.data.pair import PairBatch
from thresher.distributed.groups import DataParallelGroup, Metrics
from thresher.losses.objective import Objective
from thresher.losses.pairs import NO_STATISTICS, ChosenRejectedLogps, TokenStatistics
from thresher.strategies.nonfinite import NonFiniteStep

StopRequested = Callable[[], bool]


class StepDiscarded(Exception):  # noqa: N818  # control flow, not an error
    """A stop was requested during a slow step, which has changed neither weights nor optimizer state."""


class ParameterCounts(NamedTuple):
    """Number of parameters of a model, adapters included, and of those that are trained."""

    total: int
    trained: int

    @classmethod
    def of(cls, model: nn.Module) -> ParameterCounts:
        """Count the parameters of a model that is not sharded."""
        parameters = list(model.parameters())
        return cls(sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad))


@dataclass(frozen=True)
class MicroBatch:
    """Pairs with their reference logps; reference is None for losses without one."""

    pairs: PairBatch
    reference: ChosenRejectedLogps | None


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a step.

    useful: both full sequences of every pair, for any layout. padding: computed without use. shared: not computed,
    because both sides share the prompt or no scored token depends on it.
    """

    useful: int = 0
    padding: int = 0
    shared: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.useful + other.useful, self.padding + other.padding, self.shared + other.shared)


@dataclass(frozen=True)
class StepOutcome:
    """Result of one optimizer step; a skipped step (nonfinite is set) changed neither weights nor optimizer state."""

    metrics: Metrics
    grad_norm: float
    tokens: TokenCounts
    nonfinite: NonFiniteStep | None = None
    stop_requested: bool = False

    @property
    def skipped(self) -> bool:
        return self.nonfinite is not None

    @property
    def failed(self) -> bool:
        """Whether it was skipped for another reason than a loss scale that is too large."""
        return self.nonfinite is not None and self.nonfinite.is_failure


def never() -> bool:
    return False


class Scorer(Protocol):
    """A model that scores pairs without gradient."""

    def score(self, batch: PairBatch, *, statistics: TokenStatistics = NO_STATISTICS) -> ChosenRejectedLogps: ...


class InferStrategy(Scorer, Protocol):
    """The reference's engine."""

    @property
    def dp_group(self) -> DataParallelGroup:
        """The data-parallel ranks, which score different pairs."""
        ...

    def check_logps(self, batch: PairBatch) -> None:
        """Compare the logps with those of the model's original forward; raise LayoutError if they differ."""
        ...

    def weights(self) -> Mapping[str, Tensor]: ...

    def ema_update(self, weights: Mapping[str, Tensor], alpha: float) -> None:
        """Set the weights to alpha * weights + (1 - alpha) * current."""
        ...


class TrainStrategy(Scorer, Protocol):
    """The policy's engine."""

    @property
    def device(self) -> torch.device: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def parameter_counts(self) -> ParameterCounts:
        """Those of the whole model, however it is sharded."""
        ...

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step in fp16; None in other precisions."""
        ...

    @property
    def dp_group(self) -> DataParallelGroup:
        """The data-parallel ranks that split every step."""
        ...

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        num_pairs_in_step: int,
        learning_rate: float,
        stop_requested: StopRequested = never,
    ) -> StepOutcome:
        """Forward, loss summed over pairs and divided once by num_pairs_in_step, backward, clip, optimizer.

        micro_batches are those of this rank; the outcome is that of the whole step, equal on every rank.
        stop_requested: called after the backward; the outcome tells all ranks if it is true on any. An engine may also
        call it between the micro-batches of a slow step in a run of one process, drop the gradients if it is true, and
        raise StepDiscarded.
        """
        ...

    def score_base(self, batch: PairBatch) -> ChosenRejectedLogps:
        """Score with the adapter disabled."""
        ...

    def check_logps(self, batch: PairBatch) -> None:
        """Compare the logps with those of the model's original forward; raise LayoutError if they differ."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The trainable weights by name."""
        ...

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None = None) -> Write:
        """Capture weights, optimizer state and extra tensors (by the stem of their files) at this step.

        Collective. The returned function writes this process's files; with copies, training may continue meanwhile.
        Extra tensors are sharded like the weights of the same name.
        """
        ...

    def weight_files(self, extra: Mapping[str, Mapping[str, Tensor]]) -> Write:
        """Return a function that writes this process's files of the weights and the extra tensors alone.

        Collective, like the files of `snapshot`; training must not continue before they are written.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restore weights and optimizer state bitwise, for any number of processes that wrote them."""
        ...
