"""APO: `apo_zero` for chosen responses better than the model's own, `apo_down` for worse ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from thresher.losses.base import RATIO_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class APOZero(Loss):
    """Make chosen responses more likely and rejected ones less likely.

    1 - sig(beta r_w) + sig(beta r_l): Eq. 7 of APO (2408.06266).
    """

    name = "apo_zero"
    paper = "2408.06266"
    supports = RATIO_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    @property
    def zero_margin_loss(self) -> float:
        return 1.0

    def __call__(self, pairs: PairScores) -> Tensor:
        # sig(-x) is 1 - sig(x) without the cancellation.
        return torch.sigmoid(-self.beta * pairs.log_ratios.chosen) + torch.sigmoid(
            self.beta * pairs.log_ratios.rejected
        )


@register
@dataclass(frozen=True)
class APODown(Loss):
    """Make both sides less likely, the rejected one more so.

    sig(beta r_w) + 1 - sig(beta (r_w - r_l)): Eq. 8 of APO (2408.06266).
    """

    name = "apo_down"
    paper = "2408.06266"
    supports = RATIO_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    @property
    def zero_margin_loss(self) -> float:
        return 1.0

    def __call__(self, pairs: PairScores) -> Tensor:
        margin = pairs.log_ratios.margin
        return torch.sigmoid(self.beta * pairs.log_ratios.chosen) + torch.sigmoid(-self.beta * margin)
