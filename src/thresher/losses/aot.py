"""AOT: stochastic dominance of sorted margins (`aot`, paired) or of sorted rewards (`aot_unpaired`)."""

from torch import Tensor

from thresher.losses.base import Loss
from thresher.losses.margin import smoothed_logistic
from thresher.losses.parameters import POSITIVE, UP_TO_HALF, parameter
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
class AOT(Loss):
    """Make the policy's margins dominate the reference's, quantile by quantile.

    The smoothed logistic loss of beta (sort(pi_w - pi_l) - sort(ref_w - ref_l)): AOT, paired (2406.05882).
    Value i belongs to the i-th quantile of the whole step, not to pair i.
    """

    name = "aot"
    paper = "2406.05882"
    couples_pairs = True
    supports = frozenset(("ld_alpha",))

    beta: float = parameter(0.1, POSITIVE)
    label_smoothing: float = parameter(0.0, UP_TO_HALF)

    def __call__(self, pairs: PairScores) -> Tensor:
        return _dominance(pairs.logps.margin, pairs.reference.logps.margin, self.beta, self.label_smoothing)


@register
class AOTUnpaired(Loss):
    """Make the chosen rewards dominate the rejected ones, quantile by quantile.

    The smoothed logistic loss of beta (sort(r_w) - sort(r_l)): AOT, unpaired (2406.05882).
    Value i belongs to the i-th quantile of the whole step, not to pair i.
    """

    name = "aot_unpaired"
    paper = "2406.05882"
    couples_pairs = True
    supports = frozenset(("ld_alpha",))

    beta: float = parameter(0.1, POSITIVE)
    label_smoothing: float = parameter(0.0, UP_TO_HALF)

    def __call__(self, pairs: PairScores) -> Tensor:
        return _dominance(pairs.log_ratios.chosen, pairs.log_ratios.rejected, self.beta, self.label_smoothing)


def _dominance(greater: Tensor, lesser: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Compare two sets of values, quantile by quantile."""
    return smoothed_logistic(beta * (greater.sort().values - lesser.sort().values), label_smoothing)
