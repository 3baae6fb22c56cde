"""SPPO with hard win probabilities."""

from dataclasses import dataclass

from torch import Tensor

from thresher.losses.base import RATIO_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class SPPOHard(Loss):
    """Regress each side's log ratio on a fixed target, positive for chosen and negative for rejected.

    (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2: Eq. 4.7 of SPPO (2405.00675) with win probabilities 1 and 0.
    """

    name = "sppo_hard"
    paper = "2405.00675"
    supports = RATIO_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    @property
    def zero_margin_loss(self) -> float:
        return 2.0 * (0.5 / self.beta) ** 2

    def __call__(self, pairs: PairScores) -> Tensor:
        target = 0.5 / self.beta
        return (pairs.log_ratios.chosen - target) ** 2 + (pairs.log_ratios.rejected + target) ** 2
