"""The seam under the trainer: an engine takes micro-batches and an objective, and makes one optimizer step.

The trainer knows its share of the plan among the data-parallel ranks, no axes, no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from thresher.checkpoint.collective_save import Write
from thresher.checkpoint.sharded import HostBuffers
from thresher.data.pair import PairBatch
from thresher.distributed.groups import DataParallelGroup, Metrics
from thresher.losses.objective import Objective
from thresher.losses.pairs import ChosenRejectedLogps
from thresher.strategies.nonfinite import NonFiniteStep


@dataclass(frozen=True)
class MicroBatch:
    """Pairs with what the reference says of them; reference is None for losses without one."""

    pairs: PairBatch
    reference: ChosenRejectedLogps | None


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a step: useful ones are those of both whole sequences of every pair, whatever the layout.

    padding was computed for nothing; shared was not computed: the other side's prompt served, or nothing needed it.
    """

    useful: int = 0
    padding: int = 0
    shared: int = 0

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.useful + other.useful, self.padding + other.padding, self.shared + other.shared)


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did. A step that was skipped for a non-finite loss or gradient left no trace."""

    metrics: Metrics
    grad_norm: float
    tokens: TokenCounts
    nonfinite: NonFiniteStep | None = None

    @property
    def skipped(self) -> bool:
        return self.nonfinite is not None


class Scorer(Protocol):
    """A model that scores pairs without gradient."""

    def score(self, batch: PairBatch, *, with_squared_probs: bool = False) -> ChosenRejectedLogps: ...


class InferStrategy(Scorer, Protocol):
    """The reference's engine."""

    def weights(self) -> Mapping[str, Tensor]: ...

    def ema_update(self, weights: Mapping[str, Tensor], alpha: float) -> None:
        """Move to alpha * weights + (1 - alpha) * own."""
        ...


class TrainStrategy(Scorer, Protocol):
    """The policy's engine."""

    @property
    def device(self) -> torch.device: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model was built for; None where it has no limit."""
        ...

    @property
    def dp_group(self) -> DataParallelGroup:
        """The copies of the policy that share every step."""
        ...

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        num_pairs_in_step: int,
        learning_rate: float,
    ) -> StepOutcome:
        """Forward, loss summed over pairs and divided once by num_pairs_in_step, backward, clip, optimizer.

        micro_batches are this rank's share; the outcome is that of the whole step, alike on every rank.
        """
        ...

    def score_base(self, batch: PairBatch) -> ChosenRejectedLogps:
        """Score with the adapter off."""
        ...

    def check_logps(self, batch: PairBatch) -> None:
        """Compare our logps with those of the model's own forward; stop the run when they part."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The trainable weights by name."""
        ...

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None = None) -> Write:
        """Take weights, optimizer state and extra tensors, each under the stem of its files, as they are now.

        All processes take part. The result writes this process's files; with copies, training may go on meanwhile.
        Extra tensors are split over processes as the weights of the same name.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restore weights and optimizer state, bitwise, whatever processes wrote them."""
        ...
