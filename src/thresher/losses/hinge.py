"""The hinge loss on the DPO margin, as in SLiC-HF and RSO."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import ALL_MODIFIERS, Loss
from thresher.losses.parameters import POSITIVE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class Hinge(Loss):
    """Push the reward margin up to one, and no further.

    max(0, 1 - beta z): SLiC (2305.10425) on normalized likelihoods, as in RSO (2309.06657).
    """

    name = "hinge"
    paper = "2305.10425"
    supports = ALL_MODIFIERS

    beta: float = parameter(0.1, POSITIVE)

    @property
    def zero_margin_loss(self) -> float:
        return 1.0

    def __call__(self, pairs: PairScores) -> Tensor:
        return F.relu(1.0 - pairs.shifted(self.beta * pairs.scores.margin))
