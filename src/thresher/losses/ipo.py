"""IPO on length-averaged log ratios, as its authors ran it, and on summed ones, as its equation reads."""

from dataclasses import dataclass

from torch import Tensor

from thresher.losses.base import ALL_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import ChosenRejected, PairScores


@register
@dataclass(frozen=True)
class IPO(Loss):
    """Regress the mean margin on a fixed target instead of increasing it without limit.

    (mean r_w - mean r_l - 1 / (2 beta))^2: Eq. 17 of IPO (2310.12036), each side divided by its length.
    A reward shift s moves the target: beta z + s replaces beta z.
    """

    name = "ipo"
    paper = "2310.12036"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    @property
    def zero_margin_loss(self) -> float:
        return (0.5 / self.beta) ** 2

    def __call__(self, pairs: PairScores) -> Tensor:
        return ((pairs.shifted(self.beta * pairs.mean_scores.margin) - 0.5) / self.beta) ** 2

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.mean_scores.scaled(self.beta)


@register
@dataclass(frozen=True)
class IPOSum(Loss):
    """Regress the summed margin on a fixed target, as ROLL does.

    (r_w - r_l - 1 / (2 beta))^2: Eq. 17 of IPO (2310.12036) verbatim; long responses weigh more than in `ipo`.
    """

    name = "ipo_sum"
    paper = "2310.12036"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    @property
    def zero_margin_loss(self) -> float:
        return (0.5 / self.beta) ** 2

    def __call__(self, pairs: PairScores) -> Tensor:
        return ((pairs.shifted(self.beta * pairs.scores.margin) - 0.5) / self.beta) ** 2
