"""IPO on length-averaged log ratios, the form that its authors ran."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thresher.losses.knobs import require_beta
from thresher.losses.protocol import EVERY_MODIFIER, Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class IPO:
    """Regress the mean margin on a fixed target instead of pushing it without end.

    (mean r_w - mean r_l - 1 / (2 beta))^2: Eq. 17 of IPO (2310.12036), each side divided by its length.
    A reward shift s moves the target: beta z + s stands where beta z stood.
    """

    name: ClassVar[str] = "ipo"
    paper: ClassVar[str] = "2310.12036"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = EVERY_MODIFIER

    beta: float = 0.1

    def __post_init__(self) -> None:
        require_beta("ipo", self.beta)

    @property
    def zero_margin_loss(self) -> float | None:
        return (0.5 / self.beta) ** 2

    def __call__(self, pairs: PairScores) -> Tensor:
        return ((pairs.shifted(self.beta * pairs.mean_margin) - 0.5) / self.beta) ** 2

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.mean_chosen_score, self.beta * pairs.mean_rejected_score
