"""Per-pair scores, computed once from the per-token logps; every loss is a formula over them.

The modifiers are applied here: f-DPO, LD-DPO, WPO, humanline's clamp, and the reward shift of R-DPO and the margin
column. They work with every loss that lists them in `supports`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.errors import UserError
from thresher.losses.pairs import ExampleLogps, ObjectiveInputs, ResponseLogps, segment_sums, to_fp64
from thresher.losses.parameters import FINITE

DivergenceName = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
DIVERGENCES: tuple[str, ...] = get_args(DivergenceName)

# exp(40) is 2e17, and its square, which ipo takes, still fits into fp32; beyond it the gradient is cut to zero.
_MAX_EXPONENT = 40.0


@dataclass(frozen=True)
class FDivergence:
    """f-DPO (2309.16240): regularize towards the reference by a divergence other than reverse KL.

    Maps the log ratio r = log(policy / reference) to the score f'(exp(r)); Table 1 of the paper lists f'.
    """

    name: str = "reverse_kl"
    # only for alpha_divergence; 0 gives forward KL, 1 reverse KL: one minus the paper's alpha, as in TRL
    coef: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in DIVERGENCES:
            raise UserError(f"unknown f_divergence {self.name!r}; use one of {', '.join(DIVERGENCES)}")
        FINITE.check("alpha_divergence", "f_alpha_divergence_coef", self.coef, usual=0.5)

    def __call__(self, log_ratio: Tensor) -> Tensor:
        """Compute f'(exp(log_ratio)) without overflow; 0 at log ratio 0 for every divergence."""
        if self.name == "forward_kl":
            return 1.0 - (-log_ratio).clamp(max=_MAX_EXPONENT).exp()  # f'(t) = 1 - 1/t
        if self.name == "js_divergence":
            return math.log(2.0) + F.logsigmoid(log_ratio)  # f'(t) = log(2t / (1 + t))
        if self.name == "alpha_divergence":
            return power_score(log_ratio, self.coef - 1.0)  # f'(t) = (t^(coef-1) - 1) / (coef - 1)
        return log_ratio  # f'(t) = log t + 1; the 1 cancels in every difference


def power_score(log_value: Tensor, exponent: float) -> Tensor:
    """Compute (t^exponent - 1) / exponent from log t without overflow; log t is its limit at exponent 0."""
    # Below 1e-6 the limit is more accurate than the quotient.
    if abs(exponent) < 1e-6:
        return log_value
    # expm1 keeps the digits that exp - 1 would lose
    return torch.expm1((exponent * log_value).clamp(max=_MAX_EXPONENT)) / exponent


def _token_weights(side: ResponseLogps, shared: Tensor | None, ld_alpha: float) -> Tensor | None:
    """Return the factor of each token's logp, for policy and reference: the data's weight times LD-DPO's."""
    if shared is None:
        return side.weights
    weights = ld_token_weights(side, shared, ld_alpha)
    return weights if side.weights is None else weights * side.weights


def ld_token_weights(side: ResponseLogps, shared_lengths: Tensor, ld_alpha: float) -> Tensor:
    """LD-DPO (2409.06411): weigh tokens beyond the shorter side's length by ld_alpha, all others by 1: [num_tokens].

    The shared length is min(|y_w|, |y_l|). Policy and reference get the same weights, so a policy equal to its
    reference still has margin 0. ld_alpha = 1 is plain DPO, 0 ignores the tokens beyond the shared length.
    """
    limits = torch.repeat_interleave(shared_lengths, side.lengths, output_size=side.values.numel())
    ones = to_fp64(torch.ones_like(side.values))
    return torch.where(side.positions() < limits, ones, ld_alpha * ones)


def clamped_log_ratios(policy: ResponseLogps, reference: ResponseLogps, bounds: tuple[float, float]) -> ResponseLogps:
    """Humanline (2509.24207, as in HALOs): clamp the log ratio of each token; a clamped token has no gradient."""
    ratios = to_fp64(policy.values) - to_fp64(reference.values).detach()
    return replace(policy, values=ratios.clamp(*bounds))


def reward_shift(
    length_difference: Tensor, length_penalty: float, margin: Tensor | None, constant_margin: float = 0.0
) -> Tensor | None:
    """Sum the terms added to the reward margin, outside beta and in units of reward: [num_pairs], or None.

    R-DPO (2403.19159): + length_penalty (|y_w| - |y_l|). The paper maximizes r(x, y) - alpha |y| - beta KL, whose
    optimum has r = beta log(policy / reference) + alpha |y| + c(x). Length explains part of the preference for a longer
    chosen side, so the gradient of such a pair is smaller; with a shorter chosen side it is larger.
    Margin column of the data: - margin, as in ODPO (2402.10571) and Llama 2's reward model (2307.09288, Eq. 2).
    Constant margin: the same for every pair, as SimPO's gamma (2405.14734), here with a reference too.
    """
    shifts = [] if length_penalty == 0.0 else [length_penalty * length_difference]
    shifts += [] if constant_margin == 0.0 else [torch.full_like(length_difference, -constant_margin)]
    shifts += [] if margin is None else [-margin.to(length_difference.dtype)]
    return torch.stack(shifts).sum(0) if shifts else None


def wpo_weights(policy: ExampleLogps) -> Tensor:
    """WPO (2406.11827, Eq. 2 with sampled alignment): weigh pairs by the policy's likelihood: [num_pairs], detached.

    A pair's weight is w(y_w) w(y_l) with w(y) = exp(mean over tokens of log p(y_t) - log sum_v p(v)^2): the likelihood
    relative to the policy's own samples, so flat distributions are not penalized.
    """
    with torch.no_grad():
        return (_mean_alignment(policy.chosen) + _mean_alignment(policy.rejected)).exp()


def _mean_alignment(side: ResponseLogps) -> Tensor:
    if side.log_sum_squared_probs is None:
        raise UserError(
            "wpo needs log_sum_squared_probs with the policy's logps, but the pairs have none; "
            "score the policy with Objective.statistics, or set wpo: false"
        )
    aligned = to_fp64(side.values) - side.log_sum_squared_probs
    return segment_sums(aligned, side.lengths) / side.lengths.clamp(min=1)


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
    """The pairs compared with the reference."""

    logps: ChosenRejected  # summed
    log_ratios: ChosenRejected  # log(policy / reference)
    scores: ChosenRejected  # f'(exp(log ratio)), which is the log ratio itself for reverse KL


@dataclass(frozen=True)
class PairScores:
    """Per-pair sums, each [num_pairs], in fp64 for logps of any dtype."""

    logps: ChosenRejected  #: the policy's, LD-weighted where ld_alpha is on, and by the token weights of the data
    chosen_nll: Tensor  #: never LD-weighted: likelihood terms weigh tokens as the data does
    lengths: ChosenRejected  #: scored tokens
    reference_scores: ReferenceScores | None = None
    reward_shift: Tensor | None = None  #: added to the reward margin by R-DPO and the margin column, in units of reward
    given_margin: Tensor | None = None  #: between the responses by the data: the margin column, or scores of a list

    @classmethod
    def of_equal_models(cls) -> PairScores:
        """One pair to which policy and reference give the same logps."""
        zero = torch.zeros(1, dtype=torch.float64)
        both = ChosenRejected(zero, zero)
        return cls(both, zero, ChosenRejected(zero + 1.0, zero + 1.0), ReferenceScores(both, both, both))

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
    clamp_log_ratio: tuple[float, float] | None = None,
) -> PairScores:
    """Sum the logps of each pair and apply the modifiers that act before a loss."""
    policy, reference = inputs.policy, inputs.reference
    _check_inputs(policy, reference)
    shared = None if ld_alpha == 1.0 else torch.minimum(policy.chosen.lengths, policy.rejected.lengths)
    weights = [_token_weights(side, shared, ld_alpha) for side in (policy.chosen, policy.rejected)]

    def sums(chosen: ResponseLogps, rejected: ResponseLogps) -> ChosenRejected:
        return ChosenRejected(chosen.sums(weights[0]), rejected.sums(weights[1]))

    logps = sums(policy.chosen, policy.rejected)
    dtype = logps.chosen.dtype
    lengths = ChosenRejected(policy.chosen.lengths.to(dtype), policy.rejected.lengths.to(dtype))
    chosen_nll = -logps.chosen if shared is None else -policy.chosen.sums(policy.chosen.weights)
    reference_scores = None
    if reference_free:
        reference_logps = ChosenRejected(torch.zeros_like(logps.chosen), torch.zeros_like(logps.rejected))
    elif reference is not None:
        reference_logps = ChosenRejected(*(each.detach() for each in sums(reference.chosen, reference.rejected)))
    if reference_free or reference is not None:
        log_ratios = ChosenRejected(logps.chosen - reference_logps.chosen, logps.rejected - reference_logps.rejected)
        if clamp_log_ratio and reference is not None:
            log_ratios = sums(
                clamped_log_ratios(policy.chosen, reference.chosen, clamp_log_ratio),
                clamped_log_ratios(policy.rejected, reference.rejected, clamp_log_ratio),
            )
        to_score = f_divergence or FDivergence()
        scores = ChosenRejected(to_score(log_ratios.chosen), to_score(log_ratios.rejected))
        reference_scores = ReferenceScores(reference_logps, log_ratios, scores)
    shift = reward_shift(lengths.margin, length_penalty, inputs.margin, margin)
    given = inputs.margin if inputs.values is None else inputs.values[:, 0] - inputs.values[:, 1]
    return PairScores(logps, chosen_nll, lengths, reference_scores, shift, None if given is None else to_fp64(given))


def _divide(sums: Tensor, lengths: Tensor) -> Tensor:
    # An empty response has a sum of 0; without the clamp its mean would be NaN.
    return sums / lengths.clamp(min=1.0)


def _check_inputs(policy: ExampleLogps, reference: ExampleLogps | None) -> None:
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
