"""EXO for pairs: reverse KL towards the smoothed label distribution."""

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
class EXOPair:
    """Match the label distribution in reverse KL, which seeks modes.

    sig(x) (logsig(x) - log(1 - eps)) + sig(-x) (logsig(-x) - log eps) with x = beta z: Eq. 16 of EXO (2402.00856).
    eps must be above 0: a label without doubt has infinite reverse KL.
    """

    name: ClassVar[str] = "exo_pair"
    paper: ClassVar[str] = "2402.00856"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = EVERY_MODIFIER

    beta: float = 0.1
    label_smoothing: float = 1e-3

    def __post_init__(self) -> None:
        require_beta("exo_pair", self.beta)
        require_knob("exo_pair", "label_smoothing", self.label_smoothing, above=0.0, at_most=0.5, usual=0.001)

    @property
    def zero_margin_loss(self) -> float | None:
        return -math.log(2.0) - 0.5 * (math.log1p(-self.label_smoothing) + math.log(self.label_smoothing))

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.margin)
        chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-self.label_smoothing))
        rejected = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(self.label_smoothing))
        return chosen + rejected

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score
