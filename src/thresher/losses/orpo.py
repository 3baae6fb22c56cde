"""ORPO: supervised fine-tuning with an odds-ratio penalty, stable up to probability one."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.losses.knobs import require_beta
from thresher.losses.protocol import Modifier
from thresher.losses.registry import register
from thresher.losses.scores import PairScores


@register
@dataclass(frozen=True)
class ORPO:
    """Imitate the chosen side while its odds pull ahead.

    -mean pi_w - beta logsig(log odds_w - log odds_l), odds = p / (1 - p), log p = mean pi:
    Eq. 6 and 7 of ORPO (2403.07691), whose lambda is beta here.
    """

    name: ClassVar[str] = "orpo"
    paper: ClassVar[str] = "2403.07691"
    needs_reference: ClassVar[bool] = False
    couples_pairs: ClassVar[bool] = False
    compares_sides: ClassVar[bool] = True
    supports: ClassVar[frozenset[Modifier]] = frozenset(("weight", "wpo"))

    beta: float = 0.1

    def __post_init__(self) -> None:
        require_beta("orpo", self.beta)

    @property
    def zero_margin_loss(self) -> float | None:
        return None

    def __call__(self, pairs: PairScores) -> Tensor:
        lead = _log_odds(pairs.mean_policy_chosen) - _log_odds(pairs.mean_policy_rejected)
        return pairs.mean_chosen_nll - self.beta * F.logsigmoid(lead)

    def rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        return self.beta * pairs.mean_policy_chosen, self.beta * pairs.mean_policy_rejected


def _log_odds(logp: Tensor) -> Tensor:
    """Compute log(p / (1 - p)) from log p, finite with finite gradient also where p reaches 1."""
    # At p = 1 the odds are infinite; the bound keeps their gradient 1 / (1 - p) within 1e6 and stops it beyond.
    logp = logp.clamp(max=-1e-6)
    # expm1 keeps the digits of 1 - p near p = 1; far from it log(1 - p) is added to a logp that dwarfs its rounding.
    return logp - torch.log(-torch.expm1(logp))
