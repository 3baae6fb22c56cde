"""BCO for pairs: a binary classifier whose reward shift is the running mean of rewards."""

import math
from dataclasses import dataclass, field, replace
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import RATIO_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, STATE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class BCOPair(Loss):
    """Classify each side as good or bad relative to the mean reward.

    -logsig(beta r_w - delta) - logsig(-(beta r_l - delta)): BCO (2404.04656). delta is the mean reward of both
    sides over all earlier steps, initially 0. It excludes the current step, so the pairs of a step stay independent.
    """

    name = "bco_pair"
    paper = "2404.04656"
    supports = RATIO_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)
    delta: float = field(default=0.0, metadata=STATE)
    num_pairs_seen: int = field(default=0, metadata=STATE)

    @property
    def zero_margin_loss(self) -> float:
        return _softplus(self.delta) + _softplus(-self.delta)

    def __call__(self, pairs: PairScores) -> Tensor:
        chosen, rejected = pairs.log_ratios.scaled(self.beta)
        return -F.logsigmoid(chosen - self.delta) - F.logsigmoid(-(rejected - self.delta))

    def after_step(self, chosen_reward_sum: float, rejected_reward_sum: float, num_pairs: int) -> Self:
        """Add one step to the running mean; the sums are over all ranks."""
        if num_pairs == 0:
            return self
        seen = self.num_pairs_seen + num_pairs
        step_mean = (chosen_reward_sum + rejected_reward_sum) / 2 / num_pairs
        return replace(self, delta=self.delta + (step_mean - self.delta) * num_pairs / seen, num_pairs_seen=seen)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
