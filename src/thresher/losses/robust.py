"""Robust DPO: unbiased under a known rate of flipped labels."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.knobs import require_beta, require_knob
from thresher.losses.protocol import EVERY_MODIFIER, Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class Robust:
    """Undo the bias of randomly flipped labels.

    [-(1 - eps) logsig(beta z) + eps logsig(-beta z)] / (1 - 2 eps): the unbiased loss of rDPO (2403.00409, Sec. 3);
    eps, the flip rate, must stay below one half, where the labels say nothing.
    """

    name: ClassVar[str] = "robust"
    paper: ClassVar[str] = "2403.00409"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = EVERY_MODIFIER

    beta: float = 0.1
    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        require_beta("robust", self.beta)
        require_knob("robust", "label_smoothing", self.label_smoothing, at_least=0.0, below=0.5, usual=0.1)

    @property
    def zero_margin_loss(self) -> float | None:
        return math.log(2.0)

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.margin)
        clean = (1.0 - self.label_smoothing) * F.logsigmoid(logits)
        flipped = self.label_smoothing * F.logsigmoid(-logits)
        return (flipped - clean) / (1.0 - 2.0 * self.label_smoothing)

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score
