"""Check that policy and reference agree at step 0 if they start from the same weights."""

from __future__ import annotations

import torch

from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.models.forward_check import TOLERANCES
from thresher.models.loading.load import DTYPES
from thresher.strategies.accumulate import objective_inputs
from thresher.strategies.strategy import MicroBatch, Scorer


@torch.no_grad()
def check_step_zero(policy: Scorer, first: MicroBatch, objective: Objective, dtype: str) -> None:
    """Raise if margins do not start at 0, or if the loss does not start at its zero-margin value (ln 2 for DPO)."""
    if first.reference is None:
        return
    tolerance = TOLERANCES[DTYPES[dtype]]
    scored = policy.score(first.pairs, with_squared_probs=objective.needs_squared_probs)
    if not len(first.pairs):  # a dummy batch, scored for lockstep with other ranks
        return
    sides = ((scored.chosen, first.reference.chosen), (scored.rejected, first.reference.rejected))
    distance = max((actual.values - expected.values).abs().mean().item() for actual, expected in sides)
    if not distance <= tolerance:
        raise UserError(
            f"policy and reference start from the same weights but disagree by {distance:.2g} nats per token at step "
            "0; check that reference.model_args has the same dtype and settings as actor_train.model_args"
        )
    pairs = objective_inputs(first, scored)
    expected = objective.zero_margin_loss
    if expected is None or pairs.weight is not None or pairs.margin is not None or DTYPES[dtype] != torch.float32:
        return
    loss = objective(pairs).metrics["loss"].mean
    if not abs(loss - expected) <= 1e-2 * max(1.0, abs(expected)):
        raise UserError(
            f"the loss at step 0 is {loss:.6g} instead of {expected:.6g}, its value where policy and reference agree; "
            "this is a bug in the loss, please report it"
        )
