"""Modifiers that need more than one line: f-DPO, LD-DPO, WPO, and the reward shift of R-DPO and the margin column.

They work with every loss that lists them in `supports`.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.errors import UserError
from thresher.losses.pairs import ChosenRejectedLogps, ResponseLogps, segment_sums, to_fp64
from thresher.losses.parameters import FINITE

DivergenceName = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
DIVERGENCES: tuple[str, ...] = get_args(DivergenceName)

# exp(40) is 2e17, and its square, which ipo takes, still fits into fp32; beyond it the gradient is cut to zero.
_MAX_EXPONENT = 40.0


@dataclass(frozen=True)
class FDivergence:
    """f-DPO (2309.16240): regularize towards the reference by another divergence than reverse KL.

    Maps the log ratio r = log(policy / reference) to the score f'(exp(r)); Table 1 of the paper lists f'.
    coef: only for alpha_divergence; 0 gives forward KL, 1 reverse KL. It is one minus the paper's alpha, as in TRL.
    """

    name: str = "reverse_kl"
    coef: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in DIVERGENCES:
            raise UserError(f"unknown f_divergence {self.name!r}; use one of {', '.join(DIVERGENCES)}")
        FINITE.check("alpha_divergence", "f_alpha_divergence_coef", self.coef, usual=0.5)

    def __call__(self, log_ratio: Tensor) -> Tensor:
        """Compute f'(exp(log_ratio)) without overflow; 0 at log ratio 0 for every divergence."""
        if self.name == "forward_kl":
            return 1.0 - (-log_ratio).clamp(max=_MAX_EXPONENT).exp()  # f'(t) = 1 - 1/t
        if self.name == "js_divergence":
            return math.log(2.0) + F.logsigmoid(log_ratio)  # f'(t) = log(2t / (1 + t))
        slope = self.coef - 1.0
        # Below 1e-6 the limit log t is more accurate than the quotient.
        if self.name == "alpha_divergence" and abs(slope) >= 1e-6:
            # f'(t) = (t^(coef-1) - 1) / (coef - 1); expm1 keeps the digits that exp - 1 would lose
            return torch.expm1((slope * log_ratio).clamp(max=_MAX_EXPONENT)) / slope
        return log_ratio  # f'(t) = log t + 1; the 1 cancels in every difference


def ld_token_weights(side: ResponseLogps, shared_lengths: Tensor, ld_alpha: float) -> Tensor:
    """LD-DPO (2409.06411): weigh tokens beyond the shorter side's length by ld_alpha, all others by 1: [num_tokens].

    shared_lengths: [num_pairs], min(|y_w|, |y_l|). Policy and reference get the same weights, so a policy equal to its
    reference still has margin 0. ld_alpha = 1 is plain DPO, 0 ignores the tokens beyond the shared length.
    """
    limits = torch.repeat_interleave(shared_lengths, side.lengths, output_size=side.values.numel())
    ones = to_fp64(torch.ones_like(side.values))
    return torch.where(side.positions() < limits, ones, ld_alpha * ones)


def reward_shift(
    length_difference: Tensor, length_penalty: float, margin: Tensor | None, constant_margin: float = 0.0
) -> Tensor | None:
    """Sum the terms added to the reward margin, outside beta and in units of reward: [num_pairs], or None.

    R-DPO (2403.19159): + length_penalty (|y_w| - |y_l|). The paper maximizes r(x, y) - alpha |y| - beta KL, whose
    optimum has r = beta log(policy / reference) + alpha |y| + c(x). Length explains part of the preference for a longer
    chosen side, so the gradient of such a pair is smaller; with a shorter chosen side it is larger.
    Margin column of the data: - margin, as in ODPO (2402.10571) and Llama 2's reward model (2307.09288, Eq. 2).
    constant_margin: the same for every pair, as gamma of SimPO (2405.14734), here also with a reference.
    """
    shifts = [] if length_penalty == 0.0 else [length_penalty * length_difference]
    shifts += [] if constant_margin == 0.0 else [torch.full_like(length_difference, -constant_margin)]
    shifts += [] if margin is None else [-margin.to(length_difference.dtype)]
    return torch.stack(shifts).sum(0) if shifts else None


def wpo_weights(policy: ChosenRejectedLogps) -> Tensor:
    """WPO (2406.11827, Eq. 2 with sampled alignment): weigh pairs by the policy's likelihood: [num_pairs], detached.

    A pair's weight is w(y_w) w(y_l) with w(y) = exp(mean over tokens of log p(y_t) - log sum_v p(v)^2): the likelihood
    relative to that of the policy's own samples, so that flat distributions are not penalized.
    """
    with torch.no_grad():
        return (_mean_alignment(policy.chosen) + _mean_alignment(policy.rejected)).exp()


def _mean_alignment(side: ResponseLogps) -> Tensor:
    if side.log_sum_squared_probs is None:
        raise UserError(
            "wpo needs log_sum_squared_probs with the policy's logps, but the pairs have none; "
            "score the policy with Objective.statistics, or set wpo: false"
        )
    aligned = to_fp64(side.values) - side.log_sum_squared_probs
    return segment_sums(aligned, side.lengths) / side.lengths.clamp(min=1)
