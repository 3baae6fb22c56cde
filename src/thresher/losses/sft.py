"""The likelihood of the chosen side: a term for sums of losses, or a baseline."""

from dataclasses import dataclass

from torch import Tensor

from thresher.losses.base import Loss
from thresher.losses.registry import register
from thresher.losses.scores import ChosenRejected, PairScores


@register
@dataclass(frozen=True)
class SFT(Loss):
    """Train on the likelihood of the chosen side (supervised fine-tuning).

    -mean pi_w: the generation loss of MPO (2411.10442), averaged per response, so that pairs stay independent.
    """

    name = "sft"
    paper = "2411.10442"
    needs_reference = False
    compares_sides = False
    supports = frozenset(("weight",))

    def __call__(self, pairs: PairScores) -> Tensor:
        return pairs.mean_chosen_nll

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.mean_logps
