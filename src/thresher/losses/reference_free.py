"""Losses without a reference: CPO, SimPO, ORPO and the likelihood of the chosen side."""

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import LOGIT_MODIFIERS, Loss
from thresher.losses.parameters import NON_NEGATIVE, POSITIVE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import ChosenRejected, PairScores


@register
class CPO(Loss):
    """Prefer the chosen side and train on its likelihood.

    -logsig(beta (pi_w - pi_l)) + cpo_alpha NLL_w: Eq. 3 of CPO (2401.08417); NLL is a mean per token, as in the
    authors' code.
    """

    name = "cpo"
    paper = "2401.08417"
    needs_reference = False
    supports = LOGIT_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)
    cpo_alpha: float = parameter(1.0, NON_NEGATIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return -F.logsigmoid(pairs.shifted(self.beta * pairs.logps.margin)) + self.cpo_alpha * pairs.mean_chosen_nll

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.logps.scaled(self.beta)


@register
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


@register
class ORPO(Loss):
    """Train on the chosen side's likelihood and increase the odds ratio.

    -mean pi_w - beta logsig(log odds_w - log odds_l), odds = p / (1 - p), log p = mean pi:
    Eq. 6 and 7 of ORPO (2403.07691), whose lambda is beta here.
    """

    name = "orpo"
    paper = "2403.07691"
    needs_reference = False
    supports = frozenset(("weight", "wpo"))

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        log_odds_ratio = _log_odds(pairs.mean_logps.chosen) - _log_odds(pairs.mean_logps.rejected)
        return pairs.mean_chosen_nll - self.beta * F.logsigmoid(log_odds_ratio)

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.mean_logps.scaled(self.beta)


def _log_odds(logp: Tensor) -> Tensor:
    """Compute log(p / (1 - p)) from log p; value and gradient are finite even at p = 1."""
    # At p = 1 the odds are infinite; the clamp limits their gradient 1 / (1 - p) to 1e6 and zeroes it beyond.
    logp = logp.clamp(max=-1e-6)
    # expm1 keeps the digits of 1 - p near p = 1; elsewhere the rounding of log(1 - p) is small compared with logp.
    return logp - torch.log(-torch.expm1(logp))


@register
class SFT(Loss):
    """Train on the likelihood of the chosen side (supervised fine-tuning).

    -mean pi_w: the generation loss of MPO (2411.10442), averaged per response, so pairs stay independent.
    """

    name = "sft"
    paper = "2411.10442"
    needs_reference = False
    compares_sides = False
    supports = frozenset(("weight",))

    def __call__(self, pairs: PairScores) -> Tensor:
        return pairs.mean_chosen_nll

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.mean_logps
