"""AOT on paired data: the margins' distribution must beat the reference's."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from thresher.losses.knobs import require_beta, require_knob
from thresher.losses.logistic import smoothed_logistic
from thresher.losses.protocol import Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class AOT:
    """Make the policy's margins dominate the reference's, quantile by quantile.

    The logistic of beta (sort(pi_w - pi_l) - sort(ref_w - ref_l)): AOT, paired (2406.05882).
    Value i belongs to the i-th quantile of the whole step, not to pair i.
    """

    name: ClassVar[str] = "aot"
    paper: ClassVar[str] = "2406.05882"
    needs_reference: ClassVar[bool] = True
    couples_pairs: ClassVar[bool] = True
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = frozenset(("ld_alpha",))

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        require_beta("aot", self.beta)
        require_knob("aot", "label_smoothing", self.label_smoothing, at_least=0.0, at_most=0.5, usual=0.0)

    @property
    def zero_margin_loss(self) -> float | None:
        return math.log(2.0)

    def __call__(self, pairs: PairScores) -> Tensor:
        policy = (pairs.policy_chosen - pairs.policy_rejected).sort().values
        reference = (pairs.reference_chosen - pairs.reference_rejected).sort().values
        return smoothed_logistic(self.beta * (policy - reference), self.label_smoothing)

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.chosen_score, self.beta * pairs.rejected_score
