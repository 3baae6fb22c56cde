"""APO-down: for chosen responses worse than the model."""

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
class APODown:
    """Make both sides less likely, the rejected one by more.

    sig(beta r_w) + 1 - sig(beta (r_w - r_l)): Eq. 8 of APO (2408.06266).
    """

    name: ClassVar[str] = "apo_down"
    paper: ClassVar[str] = "2408.06266"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = RATIO_MODIFIERS

    beta: float = 0.1

    def __post_init__(self) -> None:
        require_beta("apo_down", self.beta)

    @property
    def zero_margin_loss(self) -> float | None:
        return 1.0

    def __call__(self, pairs: PairScores) -> Tensor:
        lead = pairs.chosen_ratio - pairs.rejected_ratio
        return torch.sigmoid(self.beta * pairs.chosen_ratio) + torch.sigmoid(-self.beta * lead)

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score
