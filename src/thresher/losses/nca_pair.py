"""NCA for pairs: noise contrastive estimation of absolute rewards."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import RATIO_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class NCAPair(Loss):
    """Increase the chosen reward itself, not only the margin.

    -logsig(beta r_w) - 1/2 logsig(-beta r_w) - 1/2 logsig(-beta r_l): NCA with two responses (2402.05369).
    """

    name = "nca_pair"
    paper = "2402.05369"
    supports = RATIO_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    @property
    def zero_margin_loss(self) -> float:
        return 2.0 * math.log(2.0)

    def __call__(self, pairs: PairScores) -> Tensor:
        chosen, rejected = pairs.log_ratios.scaled(self.beta)
        return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))
