"""Losses that score each side by itself, by its log ratio r_w or r_l: APO, BCO, NCA and SPPO."""

from dataclasses import field, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import RATIO_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, STATE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
class APOZero(Loss):
    """Make chosen responses more likely and rejected ones less likely.

    1 - sig(beta r_w) + sig(beta r_l): Eq. 7 of APO (2408.06266).
    """

    name = "apo_zero"
    paper = "2408.06266"
    supports = RATIO_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        # sig(-x) is 1 - sig(x) without the cancellation.
        return torch.sigmoid(-self.beta * pairs.log_ratios.chosen) + torch.sigmoid(
            self.beta * pairs.log_ratios.rejected
        )


@register
class APODown(Loss):
    """Make both sides less likely, the rejected one more so.

    sig(beta r_w) + 1 - sig(beta (r_w - r_l)): Eq. 8 of APO (2408.06266).
    """

    name = "apo_down"
    paper = "2408.06266"
    supports = RATIO_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        margin = pairs.log_ratios.margin
        return torch.sigmoid(self.beta * pairs.log_ratios.chosen) + torch.sigmoid(-self.beta * margin)


@register
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


@register
class NCAPair(Loss):
    """Increase the chosen reward itself, not only the margin.

    -logsig(beta r_w) - 1/2 logsig(-beta r_w) - 1/2 logsig(-beta r_l): NCA with two responses (2402.05369).
    """

    name = "nca_pair"
    paper = "2402.05369"
    supports = RATIO_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        chosen, rejected = pairs.log_ratios.scaled(self.beta)
        return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


@register
class SPPOHard(Loss):
    """Regress each side's log ratio on a fixed target, positive for chosen and negative for rejected.

    (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2: Eq. 4.7 of SPPO (2405.00675) with win probabilities 1 and 0.
    """

    name = "sppo_hard"
    paper = "2405.00675"
    supports = RATIO_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        target = 0.5 / self.beta
        return (pairs.log_ratios.chosen - target) ** 2 + (pairs.log_ratios.rejected + target) ** 2
