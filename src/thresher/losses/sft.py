"""Plain likelihood of the chosen side: a term for mixtures, or a baseline."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thresher.losses.protocol import Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class SFT:
    """Imitate the chosen side.

    -mean pi_w: the generation loss of MPO (2411.10442), averaged per response, so that pairs stay independent.
    """

    name: ClassVar[str] = "sft"
    paper: ClassVar[str] = "2411.10442"
    needs_reference: ClassVar[bool] = False
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = False
    supports: ClassVar[frozenset[Modifier]] = frozenset(("weight",))

    @property
    def zero_margin_loss(self) -> float | None:
        return None

    def __call__(self, pairs: PairScores) -> Tensor:
        return pairs.mean_chosen_nll

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return pairs.mean_policy_chosen, pairs.mean_policy_rejected
