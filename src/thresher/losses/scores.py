"""What every loss computes from: sums of logps per pair, made once from the per-token logps.

LD weights, the f-divergence and the shift of the reward margin are applied here, so a loss file is only its formula.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thresher.errors import UserError
from thresher.losses.modifiers.f_divergence import FDivergence
from thresher.losses.modifiers.ld import shared_length, token_weights
from thresher.losses.modifiers.length_penalty import length_shift
from thresher.losses.modifiers.pair_data import margin_shift
from thresher.losses.pairs import PairLogps, ResponseLogps, SidesLogps


@dataclass(frozen=True)
class ReferenceScores:
    """The pairs as seen against the reference, each [num_pairs]; score = f'(ratio), the ratio for reverse KL."""

    chosen: Tensor
    rejected: Tensor
    chosen_ratio: Tensor
    rejected_ratio: Tensor
    chosen_score: Tensor
    rejected_score: Tensor


@dataclass(frozen=True)
class PairScores:
    """Per-pair sums, each [num_pairs], in the dtype of the policy's logps.

    policy_chosen, policy_rejected: summed logps, LD-weighted where ld_alpha is on.
    chosen_nll: minus the summed chosen logps, never LD-weighted: likelihood terms train on every token alike.
    reward_shift: what R-DPO and the data set's margin add to the difference of rewards, in units of reward.
    """

    policy_chosen: Tensor
    policy_rejected: Tensor
    chosen_nll: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    against_reference: ReferenceScores | None = None
    reward_shift: Tensor | None = None

    @property
    def num_pairs(self) -> int:
        return self.policy_chosen.numel()

    @property
    def reference(self) -> ReferenceScores:
        """Return the scores against the reference, or say how to get them."""
        if self.against_reference is None:
            raise UserError(
                "this loss compares the policy with a reference, but the pairs carry no reference logps; "
                "set reference.mode to something other than none, "
                "or use a loss without a reference: simpo, orpo, cpo, sft"
            )
        return self.against_reference

    @property
    def reference_chosen(self) -> Tensor:
        return self.reference.chosen

    @property
    def reference_rejected(self) -> Tensor:
        return self.reference.rejected

    @property
    def chosen_ratio(self) -> Tensor:
        return self.reference.chosen_ratio

    @property
    def rejected_ratio(self) -> Tensor:
        return self.reference.rejected_ratio

    @property
    def chosen_score(self) -> Tensor:
        return self.reference.chosen_score

    @property
    def rejected_score(self) -> Tensor:
        return self.reference.rejected_score

    @property
    def margin(self) -> Tensor:
        """z: how much further the policy prefers the chosen side than the reference does."""
        return self.chosen_score - self.rejected_score

    @property
    def mean_policy_chosen(self) -> Tensor:
        return _per_token(self.policy_chosen, self.chosen_length)

    @property
    def mean_policy_rejected(self) -> Tensor:
        return _per_token(self.policy_rejected, self.rejected_length)

    @property
    def mean_chosen_score(self) -> Tensor:
        return _per_token(self.chosen_score, self.chosen_length)

    @property
    def mean_rejected_score(self) -> Tensor:
        return _per_token(self.rejected_score, self.rejected_length)

    @property
    def mean_margin(self) -> Tensor:
        return self.mean_chosen_score - self.mean_rejected_score

    @property
    def mean_chosen_nll(self) -> Tensor:
        return _per_token(self.chosen_nll, self.chosen_length)

    def shifted(self, reward_margin: Tensor) -> Tensor:
        """Add the pair's own shift to a difference of rewards: beta * z -> beta * z + shift."""
        return reward_margin if self.reward_shift is None else reward_margin + self.reward_shift


def score_pairs(
    pairs: PairLogps,
    *,
    f_divergence: FDivergence | None = None,
    ld_alpha: float = 1.0,
    length_penalty: float = 0.0,
) -> PairScores:
    """Sum the logps of each pair and apply the modifiers that act before a loss."""
    policy, reference = pairs.policy, pairs.reference
    _check_inputs(policy, reference)
    shared = None if ld_alpha == 1.0 else shared_length(policy)

    def sums(side: ResponseLogps) -> Tensor:
        return side.sums(None if shared is None else token_weights(side, shared, ld_alpha))

    policy_chosen = sums(policy.chosen)
    chosen_length = policy.chosen.lengths.to(policy_chosen.dtype)
    rejected_length = policy.rejected.lengths.to(policy_chosen.dtype)
    shifts = [
        shift
        for shift in (
            length_shift(chosen_length, rejected_length, length_penalty),
            margin_shift(pairs.margin, policy_chosen.dtype),
        )
        if shift is not None
    ]
    policy_rejected = sums(policy.rejected)
    return PairScores(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        chosen_nll=-policy_chosen if shared is None else -policy.chosen.sums(),
        chosen_length=chosen_length,
        rejected_length=rejected_length,
        against_reference=None
        if reference is None
        else _against(
            policy_chosen,
            policy_rejected,
            sums(reference.chosen).detach(),
            sums(reference.rejected).detach(),
            f_divergence or FDivergence(),
        ),
        reward_shift=torch.stack(shifts).sum(0) if shifts else None,
    )


def _against(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    chosen: Tensor,
    rejected: Tensor,
    f_divergence: FDivergence,
) -> ReferenceScores:
    chosen_ratio = policy_chosen - chosen
    rejected_ratio = policy_rejected - rejected
    return ReferenceScores(
        chosen=chosen,
        rejected=rejected,
        chosen_ratio=chosen_ratio,
        rejected_ratio=rejected_ratio,
        chosen_score=f_divergence(chosen_ratio),
        rejected_score=f_divergence(rejected_ratio),
    )


def _per_token(total: Tensor, length: Tensor) -> Tensor:
    # An empty response has a sum of 0; without the clamp its mean would be nan and poison the step.
    return total / length.clamp(min=1.0)


def _check_inputs(policy: SidesLogps, reference: SidesLogps | None) -> None:
    if policy.chosen.num_pairs != policy.rejected.num_pairs:
        raise ValueError(
            f"{policy.chosen.num_pairs} chosen but {policy.rejected.num_pairs} rejected responses; "
            "a pair has one of each"
        )
    for model, sides in (("policy", policy), ("reference", reference)):
        if sides is None:
            continue
        for word, side, scored in (
            ("chosen", sides.chosen, policy.chosen),
            ("rejected", sides.rejected, policy.rejected),
        ):
            # half precision loses a whole nat in a sum of a few hundred tokens, which is a whole margin.
            if side.values.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"{model} {word} logps are {side.values.dtype}; losses need fp32 or fp64")
            if side.values.shape != scored.values.shape or side.lengths.shape != scored.lengths.shape:
                raise ValueError(
                    f"{model} scored {side.values.numel()} {word} tokens of {side.num_pairs} pairs, "
                    f"the policy {scored.values.numel()} of {scored.num_pairs}; both must score the same tokens"
                )
