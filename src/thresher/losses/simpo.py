"""SimPO: length-normalised rewards without a reference."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.knobs import require_beta, require_knob
from thresher.losses.protocol import LOGIT_MODIFIERS, Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class SimPO:
    """Let the mean logp be the reward and ask for a lead of gamma.

    -logsig(beta (mean pi_w - mean pi_l) - gamma): Eq. 6 of SimPO (2405.14734).
    """

    name: ClassVar[str] = "simpo"
    paper: ClassVar[str] = "2405.14734"
    needs_reference: ClassVar[bool] = False
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = LOGIT_MODIFIERS

    beta: float = 2.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        require_beta("simpo", self.beta, usual=2.0)
        require_knob("simpo", "gamma", self.gamma, at_least=0.0, usual=1.0)

    @property
    def zero_margin_loss(self) -> float | None:
        return None

    def __call__(self, pairs: PairScores) -> Tensor:
        lead = self.beta * (pairs.mean_policy_chosen - pairs.mean_policy_rejected)
        return -F.logsigmoid(pairs.shifted(lead) - self.gamma)

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.mean_policy_chosen, self.beta * pairs.mean_policy_rejected
