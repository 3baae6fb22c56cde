"""TR-DPO (arXiv 2404.09656): a reference that follows the policy, and that checkpoints carry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thresher.checkpoint.tensors import load_tensors, save_tensors
from thresher.strategies.strategy import InferStrategy, TrainStrategy


@dataclass(frozen=True)
class SyncedReference:
    """Pull the reference towards the policy every `every_steps` steps by `alpha`."""

    reference: InferStrategy
    policy: TrainStrategy
    every_steps: int
    alpha: float

    def after_step(self, step: int) -> None:
        if step % self.every_steps == 0:
            self.reference.pull_towards(self.policy.weights(), self.alpha)

    def save(self, directory: Path) -> None:
        save_tensors(directory, "reference", self.reference.weights())

    def load(self, directory: Path) -> None:
        # alpha 1 copies; the reference's own past is in the checkpoint, never the policy's weights
        self.reference.pull_towards(load_tensors(directory, "reference"), 1.0)
