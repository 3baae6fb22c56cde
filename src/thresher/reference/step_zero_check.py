"""Check that policy and reference agree at step 0 if they start from the same weights."""

from __future__ import annotations

import math
from typing import Literal

import torch

from thresher.engines.accumulate import MicroBatch, objective_inputs
from thresher.engines.engine import Scorer
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.models.loading.load import DTYPES

# what the forwards of policy and reference have in common: all, the mesh, or only the weights
Forwards = Literal["same", "other batches", "other mesh"]
# mean difference of a logp in nats, the largest that benchmarks/step_zero.py measured; the table of
# docs/internals/step-0-noise.md
MEASURED_NOISE = {
    torch.float32: {"other batches": 3e-7, "other mesh": 2.2e-6},
    torch.bfloat16: {"other batches": 2.5e-2, "other mesh": 2.9e-2},
    # an eighth of bf16, which has three bits less; measured up to 2.3e-3, on a CPU whose fp16 products add up in the
    # same order in any batch
    torch.float16: {"other batches": 3.1e-3, "other mesh": 3.6e-3},
}
# deeper models and other kernels are noisier than what was measured, and a false alarm stops a run; in bf16 and fp16
# there is less room below the effect of a wrong setting
_NOISE_FACTORS = {torch.float32: 100.0, torch.bfloat16: 3.0, torch.float16: 3.0}
_SAME_FORWARD = 1e-6


def tolerance(dtype: torch.dtype, forwards: Forwards, num_tokens: int) -> float:
    """Return the mean difference in nats per token up to which policy and reference count as equal."""
    if forwards == "same":
        return _SAME_FORWARD
    # the mean over a few tokens varies: single tokens differ by up to ten times the mean
    return _NOISE_FACTORS[dtype] * MEASURED_NOISE[dtype][forwards] * (1.0 + 3.0 / math.sqrt(max(1, num_tokens)))


@torch.no_grad()
def check_step_zero(
    policy: Scorer, first: MicroBatch, objective: Objective, dtype: str, forwards: Forwards = "other mesh"
) -> None:
    """Raise if margins do not start at 0, or if the loss does not start at its zero-margin value (ln 2 for DPO)."""
    if first.reference is None:
        return
    scored = policy.score(first.pairs, statistics=objective.statistics)
    if not len(first.pairs):  # a dummy batch, scored for lockstep with other ranks
        return
    sides = zip(scored.sides, first.reference.sides, strict=True)
    differences = torch.cat([(actual.values - expected.values).abs() for actual, expected in sides])
    distance, limit = differences.mean().item(), tolerance(DTYPES[dtype], forwards, differences.numel())
    if not distance <= limit:
        raise UserError(
            f"policy and reference start from the same weights but disagree by {distance:.2g} nats per token at step "
            f"0, more than the {limit:.2g} of rounding; check that reference.model_args has the same dtype and "
            "settings as actor_train.model_args"
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
