"""Length-normalised DPO, as Tulu 3 trains."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.knobs import require_beta
from thresher.losses.protocol import EVERY_MODIFIER, Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class SigmoidNorm:
    """Fit Bradley-Terry on rewards per token.

    -logsig(beta (mean r_w - mean r_l)): DPO-norm of Tulu 3 (2411.15124, Sec. 5); its beta is larger, 5 there.
    """

    name: ClassVar[str] = "sigmoid_norm"
    paper: ClassVar[str] = "2411.15124"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = EVERY_MODIFIER

    beta: float = 0.1

    def __post_init__(self) -> None:
        require_beta("sigmoid_norm", self.beta)

    @property
    def zero_margin_loss(self) -> float | None:
        return math.log(2.0)

    def __call__(self, pairs: PairScores) -> Tensor:
        return -F.logsigmoid(pairs.shifted(self.beta * pairs.mean_margin))

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.mean_chosen_score, self.beta * pairs.mean_rejected_score
