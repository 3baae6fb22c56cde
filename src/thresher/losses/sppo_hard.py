"""SPPO with hard win probabilities."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thresher.losses.knobs import require_beta
from thresher.losses.protocol import RATIO_MODIFIERS, Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class SPPOHard:
    """Regress each side's log ratio on half a win or half a loss.

    (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2: Eq. 4.7 of SPPO (2405.00675) with win probabilities 1 and 0.
    """

    name: ClassVar[str] = "sppo_hard"
    paper: ClassVar[str] = "2405.00675"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = RATIO_MODIFIERS

    beta: float = 0.1

    def __post_init__(self) -> None:
        require_beta("sppo_hard", self.beta)

    @property
    def zero_margin_loss(self) -> float | None:
        return 2.0 * (0.5 / self.beta) ** 2

    def __call__(self, pairs: PairScores) -> Tensor:
        target = 0.5 / self.beta
        return (pairs.chosen_ratio - target) ** 2 + (pairs.rejected_ratio + target) ** 2

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score
