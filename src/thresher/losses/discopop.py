"""DiscoPOP: the blend of logistic and exponential loss that a language model found."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.losses.knobs import require_beta, require_knob
from thresher.losses.protocol import EVERY_MODIFIER, Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class DiscoPOP:
    """Blend the logistic and the exponential loss by the margin itself.

    (1 - g) * -logsig(x) + g * exp(-x) with x = beta z and g = sig(x / tau): Eq. 5 of DiscoPOP (2406.08414).
    """

    name: ClassVar[str] = "discopop"
    paper: ClassVar[str] = "2406.08414"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = EVERY_MODIFIER

    beta: float = 0.1
    discopop_tau: float = 0.05

    def __post_init__(self) -> None:
        require_beta("discopop", self.beta)
        # Above 1 the gate closes more slowly than the exponential grows, and lost pairs would overflow.
        require_knob("discopop", "discopop_tau", self.discopop_tau, above=0.0, at_most=1.0, usual=0.05)

    @property
    def zero_margin_loss(self) -> float | None:
        return 0.5 * math.log(2.0) + 0.5

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.margin)
        gate = logits / self.discopop_tau
        logistic = -F.logsigmoid(logits) * torch.sigmoid(-gate)
        # One exponent instead of sig * exp: at a very negative margin that product is 0 * inf.
        exponential = torch.exp(F.logsigmoid(gate) - logits)
        return logistic + exponential

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score
