"""Per-pair scores, computed once from the per-token logps; every loss is a formula over them.

LD weights, the f-divergence and the shift of the reward margin are applied here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thresher.errors import UserError
from thresher.losses.modifiers import FDivergence, ld_token_weights, reward_shift
from thresher.losses.pairs import ChosenRejectedLogps, ObjectiveInputs, ResponseLogps


class ChosenRejected(NamedTuple):
    """One number per pair for each side: two tensors [num_pairs]."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        """Chosen minus rejected: [num_pairs]."""
        return self.chosen - self.rejected

    def scaled(self, factor: float) -> ChosenRejected:
        return ChosenRejected(factor * self.chosen, factor * self.rejected)


@dataclass(frozen=True)
class ReferenceScores:
    """The pairs compared with the reference.

    logps: summed reference logps. log_ratios: log(policy / reference). scores: f'(exp(log ratio)), which is the log
    ratio itself for reverse KL.
    """

    logps: ChosenRejected
    log_ratios: ChosenRejected
    scores: ChosenRejected


@dataclass(frozen=True)
class PairScores:
    """Per-pair sums, each [num_pairs], in fp64 for logps of any dtype.

    logps: the policy's summed logps, LD-weighted where ld_alpha is on.
    chosen_nll: minus the summed chosen logps, never LD-weighted: likelihood terms weigh every token equally.
    lengths: scored tokens.
    reward_shift: added to the reward margin by R-DPO and the data set's margin column, in units of reward.
    """

    logps: ChosenRejected
    chosen_nll: Tensor
    lengths: ChosenRejected
    reference_scores: ReferenceScores | None = None
    reward_shift: Tensor | None = None

    @property
    def num_pairs(self) -> int:
        return self.chosen_nll.numel()

    @property
    def reference(self) -> ReferenceScores:
        """Return the scores against the reference; raise a UserError if the pairs have none."""
        if self.reference_scores is None:
            raise UserError(
                "this loss compares the policy with a reference, but the pairs have no reference logps; "
                "set reference.mode to something other than none, "
                "or use a loss without a reference: simpo, orpo, cpo, sft"
            )
        return self.reference_scores

    @property
    def log_ratios(self) -> ChosenRejected:
        return self.reference.log_ratios

    @property
    def scores(self) -> ChosenRejected:
        return self.reference.scores

    @property
    def mean_logps(self) -> ChosenRejected:
        return self._per_token(self.logps)

    @property
    def mean_scores(self) -> ChosenRejected:
        return self._per_token(self.scores)

    @property
    def mean_chosen_nll(self) -> Tensor:
        return _divide(self.chosen_nll, self.lengths.chosen)

    def shifted(self, reward_margin: Tensor) -> Tensor:
        """Add each pair's reward shift to its reward margin."""
        return reward_margin if self.reward_shift is None else reward_margin + self.reward_shift

    def _per_token(self, sums: ChosenRejected) -> ChosenRejected:
        return ChosenRejected(_divide(sums.chosen, self.lengths.chosen), _divide(sums.rejected, self.lengths.rejected))


def score_pairs(
    inputs: ObjectiveInputs,
    *,
    f_divergence: FDivergence | None = None,
    ld_alpha: float = 1.0,
    length_penalty: float = 0.0,
    margin: float = 0.0,
    reference_free: bool = False,
) -> PairScores:
    """Sum the logps of each pair and apply the modifiers that act before a loss."""
    policy, reference = inputs.policy, inputs.reference
    _check_inputs(policy, reference)
    shared = None if ld_alpha == 1.0 else torch.minimum(policy.chosen.lengths, policy.rejected.lengths)

    def sums(side: ResponseLogps) -> Tensor:
        return side.sums(None if shared is None else ld_token_weights(side, shared, ld_alpha))

    logps = ChosenRejected(sums(policy.chosen), sums(policy.rejected))
    lengths = ChosenRejected(
        policy.chosen.lengths.to(logps.chosen.dtype), policy.rejected.lengths.to(logps.chosen.dtype)
    )
    chosen_nll = -logps.chosen if shared is None else -policy.chosen.sums()
    reference_scores = None
    if reference_free:
        reference_logps = ChosenRejected(torch.zeros_like(logps.chosen), torch.zeros_like(logps.rejected))
    elif reference is not None:
        reference_logps = ChosenRejected(sums(reference.chosen).detach(), sums(reference.rejected).detach())
    if reference_free or reference is not None:
        log_ratios = ChosenRejected(logps.chosen - reference_logps.chosen, logps.rejected - reference_logps.rejected)
        to_score = f_divergence or FDivergence()
        scores = ChosenRejected(to_score(log_ratios.chosen), to_score(log_ratios.rejected))
        reference_scores = ReferenceScores(reference_logps, log_ratios, scores)
    shift = reward_shift(lengths.margin, length_penalty, inputs.margin, margin)
    return PairScores(logps, chosen_nll, lengths, reference_scores, shift)


def _divide(sums: Tensor, lengths: Tensor) -> Tensor:
    # An empty response has a sum of 0; without the clamp its mean would be NaN.
    return sums / lengths.clamp(min=1.0)


def _check_inputs(policy: ChosenRejectedLogps, reference: ChosenRejectedLogps | None) -> None:
    if policy.chosen.num_pairs != policy.rejected.num_pairs:
        raise ValueError(
            f"{policy.chosen.num_pairs} chosen but {policy.rejected.num_pairs} rejected responses; "
            "each pair needs one of each"
        )
    for model, logps in (("policy", policy), ("reference", reference)):
        if logps is None:
            continue
        for name, side, expected in (
            ("chosen", logps.chosen, policy.chosen),
            ("rejected", logps.rejected, policy.rejected),
        ):
            # A sum over a few hundred tokens in half precision is off by up to a nat, as much as a typical margin.
            if side.values.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"{model} {name} logps are {side.values.dtype}; losses need fp32 or fp64")
            if side.values.shape != expected.values.shape or side.lengths.shape != expected.lengths.shape:
                raise ValueError(
                    f"{model} scored {side.values.numel()} {name} tokens of {side.num_pairs} pairs, "
                    f"the policy {expected.values.numel()} of {expected.num_pairs}; both must score the same tokens"
                )
