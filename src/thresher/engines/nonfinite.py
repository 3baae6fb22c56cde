"""Steps that are skipped for a non-finite loss or gradient: the decision, the fp16 loss scale, and the pairs behind it.

In fp16 the loss is multiplied by a dynamic scale, so that small gradients do not round to 0. Its rules and defaults are
torch.amp.GradScaler's, with two differences: the scale has a minimum, and only an overflow of the gradient halves it,
because a non-finite loss does not depend on the scale. GradScaler itself reduces overflows over the mesh of the first
gradient only, so pipeline stages and plain replicas would disagree; here the whole model's gradient norm decides, which
is equal on every process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thresher.config.roles import TrainingArgs
from thresher.data.batching.plan import PairIds
from thresher.distributed.groups import DataParallelGroup, Metrics
from thresher.losses.pairs import ExampleLogps

NonFiniteSource = Literal[
    "policy logps",
    "reference logps",
    "loss",
    "policy logps of the mismatched answer",
    "reference logps of the mismatched answer",
]
Reason = Literal["loss", "gradient", "overflow"]
MIN_SCALE = 1.0
# beyond it the scale would not be finite in fp32
MAX_SCALE = 2.0**127


@dataclass(frozen=True)
class ScoredPairs:
    """Logps and losses of some pairs, detached from the autograd graph."""

    pair_ids: PairIds
    policy: ExampleLogps
    reference: ExampleLogps | None
    per_pair: Tensor
    are_mismatched: bool = False  # scored for KTO's reference point, which all losses of the step contain

    def nonfinite(self) -> dict[int, NonFiniteSource]:
        """The non-finite pairs by id, each with the first non-finite value in the order of computation."""
        reference = _is_nonfinite(self.reference) if self.reference is not None else torch.zeros(len(self.pair_ids))
        policy, loss = _is_nonfinite(self.policy), ~self.per_pair.isfinite()
        masks: dict[NonFiniteSource, Tensor] = {"policy logps": policy, "reference logps": reference, "loss": loss}
        if self.are_mismatched:
            masks = {
                "policy logps of the mismatched answer": policy,
                "reference logps of the mismatched answer": reference,
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
    """

    reason: Reason
    pairs: Mapping[int, NonFiniteSource]
    loss_scale: float | None = None  # of the next step, in fp16

    @property
    def is_failure(self) -> bool:
        return self.reason != "overflow"


def nonfinite_reason(metrics: Metrics, grad_norm: float) -> Reason | None:
    """Decide whether to skip a step, from numbers that are equal on every process."""
    if not math.isfinite(float(metrics["loss"].sum)):
        return "loss"
    return None if math.isfinite(grad_norm) else "gradient"


@dataclass
class LossScale:
    """The next step's scale; doubled after `window` steps in a row without an overflow, halved by each overflow."""

    # a power of two, so scaling and unscaling round nothing
    value: float = 2.0**16
    window: int = 2000
    # without an overflow since the last change
    steps: int = 0

    @classmethod
    def of(cls, training: TrainingArgs, compute_dtype: torch.dtype) -> LossScale | None:
        """The scale that training starts with; None unless it is fp16."""
        if compute_dtype != torch.float16:
            return None
        return cls(2.0**training.initial_scale_power, training.loss_scale_window)

    def after_step(self, reason: Reason | None) -> Reason | None:
        """Update the scale; return why the step is skipped: an overflow is a failure only at the minimum scale."""
        if reason == "gradient":
            self.steps = 0
            if self.value > MIN_SCALE:
                self.value /= 2.0
                return "overflow"
        elif reason is None:
            self.steps += 1
            if self.steps == self.window:
                self.value, self.steps = min(self.value * 2.0, MAX_SCALE), 0
        return reason

    def state(self) -> dict[str, float | int]:
        return {"value": self.value, "steps": self.steps}

    def load(self, state: Mapping[str, float | int]) -> None:
        self.value, self.steps = float(state["value"]), int(state["steps"])


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


def _is_nonfinite(logps: ExampleLogps) -> Tensor:
    return ~torch.stack([side.sums().isfinite() for side in logps.sides]).all(0)
