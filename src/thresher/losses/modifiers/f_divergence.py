"""f-DPO (2309.16240): regularise towards the reference by another divergence than reverse KL.

The log ratio r = log(policy / reference) becomes the score f'(exp(r)); Table 1 of the paper lists f'.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.errors import UserError
from thresher.losses.knobs import require_knob

DivergenceName = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
DIVERGENCES: tuple[str, ...] = get_args(DivergenceName)

# exp(40) is 2e17, and its square, which ipo takes, still fits into fp32; beyond it the gradient is cut to zero.
_MAX_EXPONENT = 40.0


@dataclass(frozen=True)
class FDivergence:
    """Map log ratios to scores.

    coef: only for alpha_divergence; 0 gives forward KL, 1 reverse KL. It is one minus the paper's alpha, as TRL has it.
    """

    name: str = "reverse_kl"
    coef: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in DIVERGENCES:
            raise UserError(f"unknown f_divergence {self.name!r}; use one of {', '.join(DIVERGENCES)}")
        require_knob("alpha_divergence", "f_alpha_divergence_coef", self.coef, usual=0.5)

    def __call__(self, ratio: Tensor) -> Tensor:
        """Compute f'(exp(ratio)) without overflow; 0 at ratio 0 for every divergence."""
        if self.name == "forward_kl":
            return 1.0 - _bounded_exp(-ratio)  # f'(t) = 1 - 1/t
        if self.name == "js_divergence":
            return math.log(2.0) + F.logsigmoid(ratio)  # f'(t) = log(2t / (1 + t))
        if self.name == "alpha_divergence":
            return _alpha_score(ratio, self.coef)
        return ratio  # f'(t) = log t + 1; the 1 cancels in every difference


def _alpha_score(ratio: Tensor, alpha: float) -> Tensor:
    """Compute (t^(alpha-1) - 1) / (alpha - 1), whose limit at alpha = 1 is log t."""
    slope = alpha - 1.0
    # expm1 keeps the digits that exp - 1 would lose; below 1e-6 the limit is closer than the quotient.
    if abs(slope) < 1e-6:
        return ratio
    return torch.expm1((slope * ratio).clamp(max=_MAX_EXPONENT)) / slope


def _bounded_exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(max=_MAX_EXPONENT).exp()
