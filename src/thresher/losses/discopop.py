"""DiscoPOP: the blend of logistic and exponential loss that a language model discovered."""

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
class DiscoPOP(Loss):
    """Blend the logistic and the exponential loss with a gate that depends on the margin.

    (1 - g) * -logsig(x) + g * exp(-x) with x = beta z and g = sig(x / tau): Eq. 5 of DiscoPOP (2406.08414).
    """

    name = "discopop"
    paper = "2406.08414"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)
    # Above 1 the gate closes more slowly than the exponential grows, and very negative margins would overflow.
    discopop_tau: float = parameter(0.05, Range(above=0.0, at_most=1.0))

    @property
    def zero_margin_loss(self) -> float:
        return 0.5 * math.log(2.0) + 0.5

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.scores.margin)
        gate = logits / self.discopop_tau
        logistic = -F.logsigmoid(logits) * torch.sigmoid(-gate)
        # One exponent instead of sig * exp: at a very negative margin that product is 0 * inf.
        exponential = torch.exp(F.logsigmoid(gate) - logits)
        return logistic + exponential
