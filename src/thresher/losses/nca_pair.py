"""NCA for pairs: noise contrastive estimation of absolute rewards."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.knobs import require_beta
from thresher.losses.protocol import RATIO_MODIFIERS, Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class NCAPair:
    """Raise the chosen reward itself, not only its lead.

    -logsig(beta r_w) - 1/2 logsig(-beta r_w) - 1/2 logsig(-beta r_l): NCA with two responses (2402.05369).
    """

    name: ClassVar[str] = "nca_pair"
    paper: ClassVar[str] = "2402.05369"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = RATIO_MODIFIERS

    beta: float = 0.1

    def __post_init__(self) -> None:
        require_beta("nca_pair", self.beta)

    @property
    def zero_margin_loss(self) -> float | None:
        return 2.0 * math.log(2.0)

    def __call__(self, pairs: PairScores) -> Tensor:
        chosen, rejected = self.beta * pairs.chosen_ratio, self.beta * pairs.rejected_ratio
        return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score
