"""Losses on the reward margin beta z, where z is the log ratio of the chosen side minus the rejected one's."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import ALL_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, UP_TO_HALF, Range, parameter
from thresher.losses.registry import register
from thresher.losses.scores import ChosenRejected, PairScores


@register
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

    def __call__(self, pairs: PairScores) -> Tensor:
        return smoothed_logistic(pairs.shifted(self.beta * pairs.scores.margin), self.label_smoothing)


@register
class SigmoidNorm(Loss):
    """Fit a Bradley-Terry model on rewards per token (length-normalized DPO).

    -logsig(beta (mean r_w - mean r_l)): DPO-norm of Tulu 3 (2411.15124, Sec. 5); its beta is larger, 5 in the paper.
    """

    name = "sigmoid_norm"
    paper = "2411.15124"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return -F.logsigmoid(pairs.shifted(self.beta * pairs.mean_scores.margin))

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.mean_scores.scaled(self.beta)


def smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    """Compute -(1 - eps) logsig(x) - eps logsig(-x)."""
    return -(1.0 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


@register
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

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.scores.margin)
        clean = (1.0 - self.label_smoothing) * F.logsigmoid(logits)
        flipped = self.label_smoothing * F.logsigmoid(-logits)
        return (flipped - clean) / (1.0 - 2.0 * self.label_smoothing)


@register
class Hinge(Loss):
    """Push the reward margin up to one, and no further.

    max(0, 1 - beta z): SLiC (2305.10425) on normalized likelihoods, as in RSO (2309.06657).
    """

    name = "hinge"
    paper = "2305.10425"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return F.relu(1.0 - pairs.shifted(self.beta * pairs.scores.margin))


@register
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

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.scores.margin)
        gate = logits / self.discopop_tau
        logistic = -F.logsigmoid(logits) * torch.sigmoid(-gate)
        # One exponent instead of sig * exp: at a very negative margin that product is 0 * inf.
        exponential = torch.exp(F.logsigmoid(gate) - logits)
        return logistic + exponential


@register
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

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.scores.margin)
        chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-self.label_smoothing))
        rejected = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(self.label_smoothing))
        return chosen + rejected


@register
class IPO(Loss):
    """Regress the mean margin on a fixed target instead of increasing it without limit.

    (mean r_w - mean r_l - 1 / (2 beta))^2: Eq. 17 of IPO (2310.12036), each side divided by its length.
    """

    name = "ipo"
    paper = "2310.12036"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return _squared_distance(pairs, pairs.mean_scores.margin, self.beta)

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.mean_scores.scaled(self.beta)


@register
class IPOSum(Loss):
    """Regress the summed margin on a fixed target, as ROLL does.

    (r_w - r_l - 1 / (2 beta))^2: Eq. 17 of IPO (2310.12036) verbatim; long responses weigh more than in `ipo`.
    """

    name = "ipo_sum"
    paper = "2310.12036"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return _squared_distance(pairs, pairs.scores.margin, self.beta)


def _squared_distance(pairs: PairScores, margin: Tensor, beta: float) -> Tensor:
    """Compute (margin - 1 / (2 beta))^2. A reward shift s moves the target: beta z + s replaces beta z."""
    return ((pairs.shifted(beta * margin) - 0.5) / beta) ** 2
