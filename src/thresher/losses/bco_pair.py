"""BCO for pairs: a binary classifier whose reward shift is the running mean of rewards."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch.nn.functional as F
from torch import Tensor

from thresher.errors import UserError
from thresher.losses.knobs import require_beta
from thresher.losses.protocol import RATIO_MODIFIERS, Modifier
from thresher.losses.registry import STATE, register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class BCOPair:
    """Classify each side as good or bad against the mean reward.

    -logsig(beta r_w - delta) - logsig(-(beta r_l - delta)): BCO (2404.04656). delta is the mean reward of both
    sides over all earlier steps, 0 at first; without the current step in it the pairs of a step stay independent.
    """

    name: ClassVar[str] = "bco_pair"
    paper: ClassVar[str] = "2404.04656"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = RATIO_MODIFIERS

    beta: float = 0.1
    delta: float = field(default=0.0, metadata=STATE)
    num_pairs_seen: int = field(default=0, metadata=STATE)

    def __post_init__(self) -> None:
        require_beta("bco_pair", self.beta)

    @property
    def zero_margin_loss(self) -> float | None:
        return _softplus(self.delta) + _softplus(-self.delta)

    def __call__(self, pairs: PairScores) -> Tensor:
        chosen = self.beta * pairs.chosen_ratio - self.delta
        rejected = self.beta * pairs.rejected_ratio - self.delta
        return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score

    def advanced(self, chosen_reward_sum: float, rejected_reward_sum: float, num_pairs: int) -> Self:
        """Take one finished step into the running mean; the sums are over all ranks."""
        if num_pairs == 0:
            return self
        seen = self.num_pairs_seen + num_pairs
        step_mean = (chosen_reward_sum + rejected_reward_sum) / 2 / num_pairs
        return replace(self, delta=self.delta + (step_mean - self.delta) * num_pairs / seen, num_pairs_seen=seen)

    def state(self) -> dict[str, float]:
        return {"delta": self.delta, "num_pairs_seen": float(self.num_pairs_seen)}

    def with_state(self, state: Mapping[str, float]) -> Self:
        """Return this loss with a saved running mean."""
        if set(state) != {"delta", "num_pairs_seen"}:
            raise UserError(
                f"bco_pair keeps delta and num_pairs_seen, the saved state has {sorted(state)}; "
                "resume with the loss that the checkpoint was made with"
            )
        return replace(self, delta=float(state["delta"]), num_pairs_seen=int(state["num_pairs_seen"]))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
