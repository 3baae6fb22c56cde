"""Learning rate as a pure function of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import get_scheduler


@dataclass(frozen=True)
class Schedule:
    """Peak rate times a multiplier; the horizon is in optimizer steps, whatever the number of ranks."""

    name: str
    learning_rate: float
    num_warmup_steps: int
    num_steps: int
    min_lr_ratio: float = 0.1
    power: float = 1.0

    def __call__(self, step: int) -> float:
        """Return the rate for step `step`, counted from 0."""
        return self.learning_rate * self._multiplier(step)

    @cached_property
    def _multiplier(self) -> Callable[[int], float]:
        specific: dict[str, dict[str, Any]] = {
            "cosine_with_min_lr": {"min_lr_rate": self.min_lr_ratio},
            "polynomial": {"lr_end": 0.0, "power": self.power},
        }
        # transformers' formulas without its state: only the multiplier is taken out of the scheduler it builds
        carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=self.learning_rate)
        scheduler = get_scheduler(
            self.name, carrier, self.num_warmup_steps, self.num_steps, scheduler_specific_kwargs=specific.get(self.name)
        )
        multiplier: Callable[[int], float] = scheduler.lr_lambdas[0]
        return multiplier
