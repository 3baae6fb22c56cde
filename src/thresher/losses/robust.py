"""Robust DPO: unbiased under a known rate of flipped labels."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import ALL_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, Range, parameter
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class Robust(Loss):
    """Remove the bias of randomly flipped labels from DPO.

    [-(1 - eps) logsig(beta z) + eps logsig(-beta z)] / (1 - 2 eps): the unbiased loss of rDPO (2403.00409, Sec. 3);
    eps, the flip rate, must be below one half, where labels carry no information.
    """

    name = "robust"
    paper = "2403.00409"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)
    label_smoothing: float = parameter(0.1, Range(at_least=0.0, below=0.5))

    @property
    def zero_margin_loss(self) -> float:
        return math.log(2.0)

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.scores.margin)
        clean = (1.0 - self.label_smoothing) * F.logsigmoid(logits)
        flipped = self.label_smoothing * F.logsigmoid(-logits)
        return (flipped - clean) / (1.0 - 2.0 * self.label_smoothing)
