"""A loss of another package: DPO with a floor under the loss of each pair."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import RATIO_MODIFIERS, Loss
from thresher.losses.parameters import NON_NEGATIVE, POSITIVE, parameter
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register("toy_floor", paper="none", supports=RATIO_MODIFIERS)
class ToyFloor(Loss):
    """Stop at a loss of `floor` per pair."""

    beta: float = parameter(0.1, POSITIVE)
    floor: float = parameter(0.0, NON_NEGATIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return torch.clamp(-F.logsigmoid(self.beta * pairs.log_ratios.margin), min=self.floor)
