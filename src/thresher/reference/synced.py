"""TR-DPO (arXiv 2404.09656): a reference that follows the policy, and is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from thresher.checkpoint.state import load_weights
from thresher.strategies.strategy import InferStrategy, TrainStrategy

STEM = "reference"


@dataclass(frozen=True)
class SyncedReference:
    """Move the reference towards the policy by `alpha` every `every_steps` steps."""

    reference: InferStrategy
    policy: TrainStrategy
    every_steps: int
    alpha: float

    def after_step(self, step: int) -> None:
        if step % self.every_steps == 0:
            self.reference.ema_update(self.policy.weights(), self.alpha)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {STEM: self.reference.weights()}

    def load(self, directory: Path) -> None:
        weights = self.reference.weights()
        other_rank_names = self.policy.dp_group.world.names_on_other_ranks(weights)
        hint = "resume with the same reference settings"
        load_weights(directory, weights, stem=STEM, hint=hint, other_rank_names=other_rank_names)
