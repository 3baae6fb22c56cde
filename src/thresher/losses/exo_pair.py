"""EXO for pairs: reverse KL to the smoothed label distribution."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import ALL_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, Range, parameter
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class EXOPair(Loss):
    """Match the label distribution in reverse KL, which is mode-seeking.

    sig(x) (logsig(x) - log(1 - eps)) + sig(-x) (logsig(-x) - log eps) with x = beta z: Eq. 16 of EXO (2402.00856).
    eps must be above 0: the reverse KL to a one-hot label is infinite.
    """

    name = "exo_pair"
    paper = "2402.00856"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)
    label_smoothing: float = parameter(1e-3, Range(above=0.0, at_most=0.5))

    @property
    def zero_margin_loss(self) -> float:
        return -math.log(2.0) - 0.5 * (math.log1p(-self.label_smoothing) + math.log(self.label_smoothing))

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.scores.margin)
        chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-self.label_smoothing))
        rejected = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(self.label_smoothing))
        return chosen + rejected
