"""ORPO: supervised fine-tuning with an odds-ratio penalty, stable up to probability one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import Loss
from thresher.losses.parameters import POSITIVE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import ChosenRejected, PairScores


@register
@dataclass(frozen=True)
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
