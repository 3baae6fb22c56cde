"""Find the pairs behind a non-finite loss or gradient; runs only for steps that are skipped."""

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

NonFiniteSource = Literal["policy logps", "reference logps", "loss"]
Reason = Literal["loss", "gradient", "overflow"]


@dataclass(frozen=True)
class ScoredPairs:
    """Logps and losses of some pairs, detached from the autograd graph."""

    pair_ids: PairIds
    policy: ChosenRejectedLogps
    reference: ChosenRejectedLogps | None
    per_pair: Tensor

    @classmethod
    def of(cls, pair_ids: PairIds, inputs: ObjectiveInputs, per_pair: Tensor) -> ScoredPairs:
        return cls(pair_ids, inputs.policy.detach(), inputs.reference, per_pair.detach())

    def nonfinite(self) -> dict[int, NonFiniteSource]:
        """The non-finite pairs by id, each with the first non-finite value in the order of computation."""
        reference = _is_nonfinite(self.reference) if self.reference is not None else torch.zeros(len(self.pair_ids))
        masks: dict[NonFiniteSource, Tensor] = {
            "policy logps": _is_nonfinite(self.policy),
            "reference logps": reference,
            "loss": ~self.per_pair.isfinite(),
        }
        found: dict[int, NonFiniteSource] = {}
        for source, mask in masks.items():
            for index in mask.nonzero().flatten().tolist():
                found.setdefault(int(self.pair_ids[index]), source)
        return found


@dataclass(frozen=True)
class NonFiniteStep:
    """Why a step was skipped, and its non-finite pairs; empty if no single pair is responsible.

    An overflow is a gradient beyond the range of fp16, which a lower loss scale avoids: a normal event, with no pairs.
    loss_scale: of the next step, in fp16.
    """

    reason: Reason
    pairs: Mapping[int, NonFiniteSource]
    loss_scale: float | None = None

    @property
    def is_failure(self) -> bool:
        return self.reason != "overflow"


def nonfinite_reason(metrics: Metrics, grad_norm: float) -> Reason | None:
    """Decide whether to skip a step, from numbers that are equal on every process."""
    if not math.isfinite(float(metrics["loss"].sum)):
        return "loss"
    return None if math.isfinite(grad_norm) else "gradient"


def find_nonfinite_pairs(
    scored_pairs: Sequence[ScoredPairs], dp_group: DataParallelGroup, *, couples_pairs: bool
) -> dict[int, NonFiniteSource]:
    """Collect the non-finite pairs of the step from all processes; collective, with the same result everywhere.

    In a loss that couples pairs, one pair with non-finite logps makes the loss of every other pair non-finite, so only
    pairs with non-finite logps are returned if there are any.
    """
    local = {pair: source for scored in scored_pairs for pair, source in scored.nonfinite().items()}
    found = {pair: source for each in dp_group.metrics_group.all_gather_object(local) for pair, source in each.items()}
    with_bad_logps: dict[int, NonFiniteSource] = {pair: source for pair, source in found.items() if source != "loss"}
    return with_bad_logps if couples_pairs and with_bad_logps else found


def _is_nonfinite(sides: ChosenRejectedLogps) -> Tensor:
    return ~(sides.chosen.sums().isfinite() & sides.rejected.sums().isfinite())
