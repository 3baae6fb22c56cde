"""APO-zero: for chosen responses better than the model."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thresher.losses.knobs import require_beta
from thresher.losses.protocol import RATIO_MODIFIERS, Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class APOZero:
    """Make chosen responses likelier and rejected ones less likely.

    1 - sig(beta r_w) + sig(beta r_l): Eq. 7 of APO (2408.06266).
    """

    name: ClassVar[str] = "apo_zero"
    paper: ClassVar[str] = "2408.06266"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = RATIO_MODIFIERS

    beta: float = 0.1

    def __post_init__(self) -> None:
        require_beta("apo_zero", self.beta)

    @property
    def zero_margin_loss(self) -> float | None:
        return 1.0

    def __call__(self, pairs: PairScores) -> Tensor:
        # sig(-x) is 1 - sig(x) without its cancellation.
        return torch.sigmoid(-self.beta * pairs.chosen_ratio) + torch.sigmoid(self.beta * pairs.rejected_ratio)

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score
