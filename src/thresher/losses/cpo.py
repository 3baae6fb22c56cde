"""CPO: DPO with a uniform reference, plus likelihood of the chosen side."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from thresher.losses.knobs import require_beta, require_knob
from thresher.losses.protocol import LOGIT_MODIFIERS, Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class CPO:
    """Prefer the chosen side and keep imitating it.

    -logsig(beta (pi_w - pi_l)) + cpo_alpha NLL_w: Eq. 3 of CPO (2401.08417); NLL is a mean per token, as in the
    authors' code.
    """

    name: ClassVar[str] = "cpo"
    paper: ClassVar[str] = "2401.08417"
    needs_reference: ClassVar[bool] = False
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = LOGIT_MODIFIERS

    beta: float = 0.1
    cpo_alpha: float = 1.0

    def __post_init__(self) -> None:
        require_beta("cpo", self.beta)
        require_knob("cpo", "cpo_alpha", self.cpo_alpha, at_least=0.0, usual=1.0)

    @property
    def zero_margin_loss(self) -> float | None:
        return None

    def __call__(self, pairs: PairScores) -> Tensor:
        lead = pairs.shifted(self.beta * (pairs.policy_chosen - pairs.policy_rejected))
        return -F.logsigmoid(lead) + self.cpo_alpha * pairs.mean_chosen_nll

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.policy_chosen, self.beta * pairs.policy_rejected
