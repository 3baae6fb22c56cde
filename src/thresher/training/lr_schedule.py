"""Learning rate as a pure function of the optimizer step, with the formulas of transformers' `get_scheduler`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LRSchedule:
    """Peak rate times a multiplier; warmup and length are in optimizer steps, for any number of ranks."""

    name: str
    learning_rate: float
    num_warmup_steps: int
    num_steps: int
    min_lr_ratio: float = 0.1
    power: float = 1.0

    def __call__(self, step: int) -> float:
        """Return the rate for step `step`, counted from 0."""
        return self.learning_rate * self._multiplier(step)

    def _multiplier(self, step: int) -> float:
        """Bitwise equal to transformers, hence the order of the operations."""
        if self.name == "constant":
            return 1.0
        warmup = self.num_warmup_steps
        if step < warmup:
            return step / warmup
        num_decay_steps = max(1, self.num_steps - warmup)
        progress = (step - warmup) / num_decay_steps
        match self.name:
            case "constant_with_warmup":
                return 1.0
            case "linear":
                return max(0.0, (self.num_steps - step) / num_decay_steps)
            case "cosine" | "cosine_with_min_lr":
                floor = self.min_lr_ratio if self.name == "cosine_with_min_lr" else 0.0
                return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)) * (1 - floor) + floor)
            case "polynomial":
                # transformers decays the rate itself and divides by its peak, which rounds
                return self.learning_rate * math.pow(max(0.0, 1 - progress), self.power) / self.learning_rate
            case "inverse_sqrt":
                timescale = warmup or 10_000
                return 1.0 / math.sqrt((step + timescale - warmup) / timescale)
        raise ValueError(f"unknown learning rate schedule {self.name!r}")
