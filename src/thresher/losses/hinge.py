"""The hinge on the DPO margin, as SLiC-HF and RSO use it."""

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
class Hinge:
    """Ask for a reward margin of one, then leave the pair alone.

    max(0, 1 - beta z): SLiC (2305.10425) on normalised likelihoods, as RSO (2309.06657) writes it.
    """

    name: ClassVar[str] = "hinge"
    paper: ClassVar[str] = "2305.10425"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = EVERY_MODIFIER

    beta: float = 0.1

    def __post_init__(self) -> None:
        require_beta("hinge", self.beta)

    @property
    def zero_margin_loss(self) -> float | None:
        return 1.0

    def __call__(self, pairs: PairScores) -> Tensor:
        return F.relu(1.0 - pairs.shifted(self.beta * pairs.margin))

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score
