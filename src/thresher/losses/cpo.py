"""CPO: DPO with a uniform reference, plus the likelihood of the chosen side."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import LOGIT_MODIFIERS, Loss
from thresher.losses.parameters import NON_NEGATIVE, POSITIVE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import ChosenRejected, PairScores


@register
@dataclass(frozen=True)
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
