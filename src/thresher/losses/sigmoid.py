"""The DPO loss, with label smoothing (cDPO), and its length-normalized variant of Tulu 3."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import ALL_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, UP_TO_HALF, parameter
from thresher.losses.registry import register
from thresher.losses.scores import ChosenRejected, PairScores


@register
@dataclass(frozen=True)
class Sigmoid(Loss):
    """Fit the policy as an implicit Bradley-Terry reward model (DPO).

    -(1 - eps) logsig(beta z) - eps logsig(-beta z): Eq. 7 of DPO (2305.18290); eps, the fraction of flipped labels, is
    from the cDPO note (ericmitchell.ai/cdpo.pdf).
    """

    name = "sigmoid"
    paper = "2305.18290"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)
    label_smoothing: float = parameter(0.0, UP_TO_HALF)

    @property
    def zero_margin_loss(self) -> float:
        return math.log(2.0)

    def __call__(self, pairs: PairScores) -> Tensor:
        return smoothed_logistic(pairs.shifted(self.beta * pairs.scores.margin), self.label_smoothing)


@register
@dataclass(frozen=True)
class SigmoidNorm(Loss):
    """Fit a Bradley-Terry model on rewards per token (length-normalized DPO).

    -logsig(beta (mean r_w - mean r_l)): DPO-norm of Tulu 3 (2411.15124, Sec. 5); its beta is larger, 5 in the paper.
    """

    name = "sigmoid_norm"
    paper = "2411.15124"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    @property
    def zero_margin_loss(self) -> float:
        return math.log(2.0)

    def __call__(self, pairs: PairScores) -> Tensor:
        return -F.logsigmoid(pairs.shifted(self.beta * pairs.mean_scores.margin))

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.mean_scores.scaled(self.beta)


def smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    """Compute -(1 - eps) logsig(x) - eps logsig(-x)."""
    return -(1.0 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)
