"""The DPO loss, and with label smoothing the conservative one (cDPO)."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thresher.losses.knobs import require_beta, require_knob
from thresher.losses.logistic import smoothed_logistic
from thresher.losses.protocol import EVERY_MODIFIER, Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class Sigmoid:
    """Fit the policy as its own Bradley-Terry reward model.

    -(1 - eps) logsig(beta z) - eps logsig(-beta z): Eq. 7 of DPO (2305.18290); eps, the share of flipped
    labels, is the cDPO note (ericmitchell.ai/cdpo.pdf).
    """

    name: ClassVar[str] = "sigmoid"
    paper: ClassVar[str] = "2305.18290"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = EVERY_MODIFIER

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        require_beta("sigmoid", self.beta)
        require_knob("sigmoid", "label_smoothing", self.label_smoothing, at_least=0.0, at_most=0.5, usual=0.0)

    @property
    def zero_margin_loss(self) -> float | None:
        return math.log(2.0)

    def __call__(self, pairs: PairScores) -> Tensor:
        return smoothed_logistic(pairs.shifted(self.beta * pairs.margin), self.label_smoothing)

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score
