"""SimPO: length-normalized rewards without a reference."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import LOGIT_MODIFIERS, Loss
from thresher.losses.parameters import NON_NEGATIVE, POSITIVE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import ChosenRejected, PairScores


@register
@dataclass(frozen=True)
class SimPO(Loss):
    """Use the mean logp as the reward, with a target margin of gamma.

    -logsig(beta (mean pi_w - mean pi_l) - gamma): Eq. 6 of SimPO (2405.14734).
    """

    name = "simpo"
    paper = "2405.14734"
    needs_reference = False
    supports = LOGIT_MODIFIERS

    beta: float = parameter(2.0, POSITIVE)
    gamma: float = parameter(1.0, NON_NEGATIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return -F.logsigmoid(pairs.shifted(self.beta * pairs.mean_logps.margin) - self.gamma)

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.mean_logps.scaled(self.beta)
