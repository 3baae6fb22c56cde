"""Which pairs spoil a step: looked for only where its loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thresher.data.batching.plan import PairIds
from thresher.distributed.groups import DataParallelGroup, Metrics
from thresher.losses.pairs import ChosenRejectedLogps, ObjectiveInputs

Fault = Literal["policy logps", "reference logps", "loss"]
Reason = Literal["loss", "gradient"]


@dataclass(frozen=True)
class ScoredPairs:
    """What the objective saw of some pairs, and the loss that it gave each; it holds on to no graph."""

    pair_ids: PairIds
    policy: ChosenRejectedLogps
    reference: ChosenRejectedLogps | None
    per_pair: Tensor

    @classmethod
    def of(cls, pair_ids: PairIds, logps: ObjectiveInputs, per_pair: Tensor) -> ScoredPairs:
        return cls(pair_ids, logps.policy.detach(), logps.reference, per_pair.detach())

    def faults(self) -> dict[int, Fault]:
        """What is not finite of each pair, by the pair's number; the first in the order of computing is the cause."""
        reference = _is_spoilt(self.reference) if self.reference is not None else torch.zeros(len(self.pair_ids))
        columns = (_is_spoilt(self.policy), reference, ~self.per_pair.isfinite())
        faults: dict[int, Fault] = {}
        names: tuple[Fault, ...] = ("policy logps", "reference logps", "loss")
        for name, column in zip(names, columns, strict=True):
            for at in column.nonzero().flatten().tolist():
                faults.setdefault(int(self.pair_ids[at]), name)
        return faults


@dataclass(frozen=True)
class NonFiniteStep:
    """Why a step was skipped, and what is not finite of which pairs; no pairs where none can be told apart."""

    reason: Reason
    pairs: Mapping[int, Fault]


def nonfinite_reason(metrics: Metrics, grad_norm: float) -> Reason | None:
    """Judge a step by numbers that every process has alike."""
    if not math.isfinite(float(metrics["loss"].sum)):
        return "loss"
    return None if math.isfinite(grad_norm) else "gradient"


def find_nonfinite_pairs(
    seen: Sequence[ScoredPairs], ranks: DataParallelGroup, *, couples_pairs: bool
) -> dict[int, Fault]:
    """Name the faults of all pairs of the step, on every process alike; all take part.

    Where a loss couples pairs, one without sound logps spoils the loss of every other, which is not to blame then.
    """
    own = {pair: fault for each in seen for pair, fault in each.faults().items()}
    found = {pair: fault for part in ranks.metrics_group.all_gather_object(own) for pair, fault in part.items()}
    of_logps: dict[int, Fault] = {pair: fault for pair, fault in found.items() if fault != "loss"}
    return of_logps if couples_pairs and of_logps else found


def _is_spoilt(sides: ChosenRejectedLogps) -> Tensor:
    return ~(sides.chosen.sums().isfinite() & sides.rejected.sums().isfinite())
