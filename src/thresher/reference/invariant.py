"""Step 0: a policy that starts from the reference's weights must say exactly what the reference says."""

from __future__ import annotations

from thresher.errors import UserError
from thresher.models.load import DTYPES
from thresher.models.selfcheck import TOLERANCES
from thresher.strategies.strategy import MicroBatch, Scorer


def check_step_zero(policy: Scorer, first: MicroBatch, dtype: str) -> None:
    """Stop a run whose margins do not start at 0: its loss would start away from ln 2 for no good reason."""
    if first.reference is None:
        return
    scored = policy.score(first.pairs)
    distance = max(
        (ours.values - theirs.values).abs().mean().item()
        for ours, theirs in ((scored.chosen, first.reference.chosen), (scored.rejected, first.reference.rejected))
    )
    if not distance <= TOLERANCES[DTYPES[dtype]]:
        raise UserError(
            f"policy and reference start from the same weights but disagree by {distance:.2g} nats a token at "
            "step 0; check that reference.model_args has the same dtype and settings as actor_train.model_args"
        )
