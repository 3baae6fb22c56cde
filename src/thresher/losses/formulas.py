"""The built-in losses: on the reward margin, on sorted values, on the reward of each side, and without a reference.

r_w and r_l are the log ratios of the chosen and the rejected side, and z = r_w - r_l.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.losses.base import ALL_MODIFIERS, LOGIT_MODIFIERS, RATIO_MODIFIERS, Loss
from thresher.losses.parameters import FINITE, NON_NEGATIVE, POSITIVE, STATE, UP_TO_HALF, Range, parameter
from thresher.losses.registry import register
from thresher.losses.scores import ChosenRejected, PairScores, power_score


@register("sigmoid", paper="2305.18290", supports=ALL_MODIFIERS)
class Sigmoid(Loss):
    """Fit the policy as an implicit Bradley-Terry reward model (DPO).

    -(1 - eps) logsig(beta z) - eps logsig(-beta z): Eq. 7 of DPO (2305.18290); eps, the fraction of flipped labels, is
    from the cDPO note (ericmitchell.ai/cdpo.pdf).
    """

    beta: float = parameter(0.1, POSITIVE)
    label_smoothing: float = parameter(0.0, UP_TO_HALF)

    def __call__(self, pairs: PairScores) -> Tensor:
        return smoothed_logistic(pairs.shifted(self.beta * pairs.scores.margin), self.label_smoothing)


@register("sigmoid_norm", paper="2411.15124", supports=ALL_MODIFIERS, reward="mean_scores")
class SigmoidNorm(Loss):
    """Fit a Bradley-Terry model on rewards per token (length-normalized DPO).

    -logsig(beta (mean r_w - mean r_l)): DPO-norm of Tulu 3 (2411.15124, Sec. 5); its beta is larger, 5 in the paper.
    """

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return -F.logsigmoid(pairs.shifted(self.beta * pairs.mean_scores.margin))


def smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    """Compute -(1 - eps) logsig(x) - eps logsig(-x)."""
    return -(1.0 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


@register("robust", paper="2403.00409", supports=ALL_MODIFIERS)
class Robust(Loss):
    """Remove the bias of randomly flipped labels from DPO.

    [-(1 - eps) logsig(beta z) + eps logsig(-beta z)] / (1 - 2 eps): the unbiased loss of rDPO (2403.00409, Sec. 3);
    eps, the flip rate, must be below one half, where labels carry no information.
    """

    beta: float = parameter(0.1, POSITIVE)
    label_smoothing: float = parameter(0.1, Range(at_least=0.0, below=0.5))

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.scores.margin)
        clean = (1.0 - self.label_smoothing) * F.logsigmoid(logits)
        flipped = self.label_smoothing * F.logsigmoid(-logits)
        return (flipped - clean) / (1.0 - 2.0 * self.label_smoothing)


@register("hinge", paper="2305.10425", supports=ALL_MODIFIERS)
class Hinge(Loss):
    """Push the reward margin up to one, and no further.

    max(0, 1 - beta z): SLiC (2305.10425) on normalized likelihoods, as in RSO (2309.06657).
    """

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return F.relu(1.0 - pairs.shifted(self.beta * pairs.scores.margin))


@register("discopop", paper="2406.08414", supports=ALL_MODIFIERS)
class DiscoPOP(Loss):
    """Blend the logistic and the exponential loss with a gate that depends on the margin.

    (1 - g) * -logsig(x) + g * exp(-x) with x = beta z and g = sig(x / tau): Eq. 5 of DiscoPOP (2406.08414).
    """

    beta: float = parameter(0.1, POSITIVE)
    # Above 1 the gate closes more slowly than the exponential grows, and very negative margins would overflow.
    discopop_tau: float = parameter(0.05, Range(above=0.0, at_most=1.0))

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.scores.margin)
        gate = logits / self.discopop_tau
        logistic = -F.logsigmoid(logits) * torch.sigmoid(-gate)
        # One exponent instead of sig * exp: at a very negative margin that product is 0 * inf.
        exponential = torch.exp(F.logsigmoid(gate) - logits)
        return logistic + exponential


@register("exo_pair", paper="2402.00856", supports=ALL_MODIFIERS)
class EXOPair(Loss):
    """Match the label distribution in reverse KL, which is mode-seeking.

    sig(x) (logsig(x) - log(1 - eps)) + sig(-x) (logsig(-x) - log eps) with x = beta z: Eq. 16 of EXO (2402.00856).
    eps must be above 0: the reverse KL to a one-hot label is infinite.
    """

    beta: float = parameter(0.1, POSITIVE)
    label_smoothing: float = parameter(1e-3, Range(above=0.0, at_most=0.5))

    def __call__(self, pairs: PairScores) -> Tensor:
        logits = pairs.shifted(self.beta * pairs.scores.margin)
        chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-self.label_smoothing))
        rejected = torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(self.label_smoothing))
        return chosen + rejected


@register("dpop", paper="2402.13228", supports=ALL_MODIFIERS - {"f_divergence", "reference_free"})
class DPOP(Loss):
    """Subtract from the margin what the chosen side lost in likelihood, so that it stays likely (DPO-Positive).

    -logsig(beta (z - dpop_lambda max(0, -r_w))): Eq. 3 of DPOP (2402.13228v2). The first version of the paper had the
    penalty outside the sigmoid, which its authors call an error (github.com/abacusai/smaug/issues/2).
    """

    beta: float = parameter(0.3, POSITIVE)
    dpop_lambda: float = parameter(50.0, NON_NEGATIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        penalty = self.dpop_lambda * F.relu(-pairs.log_ratios.chosen)
        return -F.logsigmoid(pairs.shifted(self.beta * (pairs.log_ratios.margin - penalty)))


@register("ipo", paper="2310.12036", supports=ALL_MODIFIERS, reward="mean_scores")
class IPO(Loss):
    """Regress the mean margin on a fixed target instead of increasing it without limit.

    (mean r_w - mean r_l - 1 / (2 beta))^2: Eq. 17 of IPO (2310.12036), each side divided by its length.
    """

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return _squared_distance(pairs, pairs.mean_scores.margin, self.beta)


@register("ipo_sum", paper="2310.12036", supports=ALL_MODIFIERS)
class IPOSum(Loss):
    """Regress the summed margin on a fixed target, as ROLL does.

    (r_w - r_l - 1 / (2 beta))^2: Eq. 17 of IPO (2310.12036) verbatim; long responses weigh more than in `ipo`.
    """

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return _squared_distance(pairs, pairs.scores.margin, self.beta)


def _squared_distance(pairs: PairScores, margin: Tensor, beta: float) -> Tensor:
    """Compute (margin - 1 / (2 beta))^2. A reward shift s moves the target: beta z + s replaces beta z."""
    return ((pairs.shifted(beta * margin) - 0.5) / beta) ** 2


@register("aot", paper="2406.05882", supports=["ld_alpha"], couples_pairs=True)
class AOT(Loss):
    """Make the policy's margins dominate the reference's, quantile by quantile.

    The smoothed logistic loss of beta (sort(pi_w - pi_l) - sort(ref_w - ref_l)): AOT, paired (2406.05882).
    Value i belongs to the i-th quantile of the whole step, not to pair i.
    """

    beta: float = parameter(0.1, POSITIVE)
    label_smoothing: float = parameter(0.0, UP_TO_HALF)

    def __call__(self, pairs: PairScores) -> Tensor:
        return _dominance(pairs.logps.margin, pairs.reference.logps.margin, self.beta, self.label_smoothing)


@register("aot_unpaired", paper="2406.05882", supports=["clamp_log_ratio", "ld_alpha"], couples_pairs=True)
class AOTUnpaired(Loss):
    """Make the chosen rewards dominate the rejected ones, quantile by quantile.

    The smoothed logistic loss of beta (sort(r_w) - sort(r_l)): AOT, unpaired (2406.05882).
    Value i belongs to the i-th quantile of the whole step, not to pair i.
    """

    beta: float = parameter(0.1, POSITIVE)
    label_smoothing: float = parameter(0.0, UP_TO_HALF)

    def __call__(self, pairs: PairScores) -> Tensor:
        return _dominance(pairs.log_ratios.chosen, pairs.log_ratios.rejected, self.beta, self.label_smoothing)


def _dominance(greater: Tensor, lesser: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Compare two sets of values, quantile by quantile."""
    return smoothed_logistic(beta * (greater.sort().values - lesser.sort().values), label_smoothing)


@register("apo_zero", paper="2408.06266", supports=RATIO_MODIFIERS)
class APOZero(Loss):
    """Make chosen responses more likely and rejected ones less likely.

    1 - sig(beta r_w) + sig(beta r_l): Eq. 7 of APO (2408.06266).
    """

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        chosen, rejected = pairs.log_ratios.scaled(self.beta)
        return torch.sigmoid(-chosen) + torch.sigmoid(rejected)  # sig(-x) is 1 - sig(x) without the cancellation


@register("apo_down", paper="2408.06266", supports=RATIO_MODIFIERS)
class APODown(Loss):
    """Make both sides less likely, the rejected one more so.

    sig(beta r_w) + 1 - sig(beta (r_w - r_l)): Eq. 8 of APO (2408.06266).
    """

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        margin = pairs.log_ratios.margin
        return torch.sigmoid(self.beta * pairs.log_ratios.chosen) + torch.sigmoid(-self.beta * margin)


@register("bco_pair", paper="2404.04656", supports=RATIO_MODIFIERS)
class BCOPair(Loss):
    """Classify each side as good or bad relative to the mean reward.

    -logsig(beta r_w - delta) - logsig(-(beta r_l - delta)): BCO (2404.04656). delta is the mean reward of both
    sides over all earlier steps, initially 0. It excludes the current step, so the pairs of a step stay independent.
    """

    beta: float = parameter(0.1, POSITIVE)
    delta: float = field(default=0.0, metadata=STATE)
    num_pairs_seen: int = field(default=0, metadata=STATE)

    def __call__(self, pairs: PairScores) -> Tensor:
        chosen, rejected = pairs.log_ratios.scaled(self.beta)
        return -F.logsigmoid(chosen - self.delta) - F.logsigmoid(-(rejected - self.delta))

    def after_step(self, chosen_reward_sum: float, rejected_reward_sum: float, num_pairs: int) -> Self:
        """Add one step to the running mean; the sums are over all ranks."""
        if num_pairs == 0:
            return self
        seen = self.num_pairs_seen + num_pairs
        step_mean = (chosen_reward_sum + rejected_reward_sum) / 2 / num_pairs
        return replace(self, delta=self.delta + (step_mean - self.delta) * num_pairs / seen, num_pairs_seen=seen)


@register("nca_pair", paper="2402.05369", supports=RATIO_MODIFIERS)
class NCAPair(Loss):
    """Increase the chosen reward itself, not only the margin.

    -logsig(beta r_w) - 1/2 logsig(-beta r_w) - 1/2 logsig(-beta r_l): NCA with two responses (2402.05369).
    """

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        chosen, rejected = pairs.log_ratios.scaled(self.beta)
        return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


@register("sppo_hard", paper="2405.00675", supports=RATIO_MODIFIERS)
class SPPOHard(Loss):
    """Regress each side's log ratio on a fixed target, positive for chosen and negative for rejected.

    (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2: Eq. 4.7 of SPPO (2405.00675) with win probabilities 1 and 0.
    """

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        target = 0.5 / self.beta
        return (pairs.log_ratios.chosen - target) ** 2 + (pairs.log_ratios.rejected + target) ** 2


@register("cpo", paper="2401.08417", supports=LOGIT_MODIFIERS, needs_reference=False, reward="logps")
class CPO(Loss):
    """Prefer the chosen side and train on its likelihood.

    -logsig(beta (pi_w - pi_l)) + cpo_alpha NLL_w: Eq. 3 of CPO (2401.08417); NLL is a mean per token, as in the
    authors' code.
    """

    beta: float = parameter(0.1, POSITIVE)
    cpo_alpha: float = parameter(1.0, NON_NEGATIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return -F.logsigmoid(pairs.shifted(self.beta * pairs.logps.margin)) + self.cpo_alpha * pairs.mean_chosen_nll


@register("simpo", paper="2405.14734", supports=LOGIT_MODIFIERS, needs_reference=False, reward="mean_logps")
class SimPO(Loss):
    """Use the mean logp as the reward, with a target margin of gamma.

    -logsig(beta (mean pi_w - mean pi_l) - gamma): Eq. 6 of SimPO (2405.14734).
    """

    beta: float = parameter(2.0, POSITIVE)
    gamma: float = parameter(1.0, NON_NEGATIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return -F.logsigmoid(pairs.shifted(self.beta * pairs.mean_logps.margin) - self.gamma)


@dataclass(frozen=True)
class RewardAware(Loss):
    """Fit the reward margin to the difference of the scores that the data has: RPO (2502.00203).

    With x = beta z and g = eta (score_w - score_l), where eta is reward_scale; as in NeMo-Aligner.
    """

    reads_given_margin: ClassVar[bool] = True
    beta: float = parameter(0.1, POSITIVE)
    reward_scale: float = parameter(1.0, POSITIVE)

    @property
    def zero_margin_loss(self) -> float | None:
        return None  # it depends on the scores

    def margins(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        """The reward margins x and g."""
        margin = self.beta * pairs.scores.margin
        given = torch.zeros_like(margin) if pairs.given_margin is None else pairs.given_margin
        return margin, self.reward_scale * given


def binary_kl(logits: Tensor, other: Tensor) -> Tensor:
    """KL divergence between the coins with probabilities sig(logits) and sig(other)."""
    heads = F.logsigmoid(logits) - F.logsigmoid(other)
    tails = F.logsigmoid(-logits) - F.logsigmoid(-other)
    return torch.sigmoid(logits) * heads + torch.sigmoid(-logits) * tails


@register("rpo_sq", paper="2502.00203", supports=["clamp_log_ratio", "f_divergence", "margin", "weight"])
class RPOSquared(RewardAware):
    """Fit the reward margin to the difference of the data's scores, by squared error.

    (x - g)^2, with x = beta z and g = reward_scale times the margin column, or the scores' difference of a list: RPO
    (2502.00203), as in NeMo-Aligner.
    """

    def __call__(self, pairs: PairScores) -> Tensor:
        margin, given = self.margins(pairs)
        return (margin - given).square()


@register("rpo_bwd_kl", paper="2502.00203", supports=["clamp_log_ratio", "f_divergence", "margin", "weight"])
class RPOBackwardKL(RewardAware):
    """Fit the preference to that of the data's scores, by the divergence of the scores from the policy.

    KL(sig(g) || sig(x)) with the x and g of `rpo_sq` (2502.00203).
    """

    def __call__(self, pairs: PairScores) -> Tensor:
        margin, given = self.margins(pairs)
        return binary_kl(given, margin)


@register("rpo_fwd_kl", paper="2502.00203", supports=["clamp_log_ratio", "f_divergence", "margin", "weight"])
class RPOForwardKL(RewardAware):
    """Fit the preference to that of the data's scores, by the divergence of the policy from the scores.

    KL(sig(x) || sig(g)) with the x and g of `rpo_sq` (2502.00203).
    """

    def __call__(self, pairs: PairScores) -> Tensor:
        margin, given = self.margins(pairs)
        return binary_kl(margin, given)


@register("bradley_terry", paper="2203.02155", supports=["margin", "weight"], needs_reference=False)
class BradleyTerry(Loss):
    """Train a reward model: a model whose head gives each response one number.

    -logsig(s_w - s_l - m) + c (s_w + s_l)^2: Eq. 1 of InstructGPT (2203.02155), with the margin column m (Llama 2,
    2307.09288, Eq. 2) and the centring term of 2312.09244 (Eq. 2), whose c is center_rewards_coefficient.
    """

    trains_rewards: ClassVar[bool] = True
    center_rewards_coefficient: float = parameter(0.0, NON_NEGATIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        loss = -F.logsigmoid(pairs.shifted(pairs.logps.margin))
        if not self.center_rewards_coefficient:
            return loss
        return loss + self.center_rewards_coefficient * (pairs.logps.chosen + pairs.logps.rejected).square()

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.logps


@register("alphapo", paper="2501.03884", supports=LOGIT_MODIFIERS, needs_reference=False)
class AlphaPO(Loss):
    """Bend SimPO's reward with a power of the likelihood per token, against less likely chosen sides.

    -logsig(beta (q_w - q_l) - gamma), q = (1 - p^-alpha) / alpha, log p = mean pi: AlphaPO (2501.03884), as in TRL's
    CPOTrainer; alpha is alphapo_alpha, and 0 gives SimPO. Defaults are Mistral-Instruct's in Table 3.
    """

    beta: float = parameter(2.5, POSITIVE)
    gamma: float = parameter(0.1, NON_NEGATIVE)
    alphapo_alpha: float = parameter(0.25, FINITE)

    def __call__(self, pairs: PairScores) -> Tensor:
        return -F.logsigmoid(pairs.shifted(self.rewards(pairs).margin) - self.gamma)

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return ChosenRejected(*(power_score(side, -self.alphapo_alpha) for side in pairs.mean_logps)).scaled(self.beta)


@register("orpo", paper="2403.07691", supports=["weight", "wpo"], needs_reference=False, reward="mean_logps")
class ORPO(Loss):
    """Train on the chosen side's likelihood and increase the odds ratio.

    -mean pi_w - beta logsig(log odds_w - log odds_l), odds = p / (1 - p), log p = mean pi:
    Eq. 6 and 7 of ORPO (2403.07691), whose lambda is beta here.
    """

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, pairs: PairScores) -> Tensor:
        log_odds_ratio = _log_odds(pairs.mean_logps.chosen) - _log_odds(pairs.mean_logps.rejected)
        return pairs.mean_chosen_nll - self.beta * F.logsigmoid(log_odds_ratio)


def _log_odds(logp: Tensor) -> Tensor:
    """Compute log(p / (1 - p)) from log p; value and gradient are finite even at p = 1."""
    # At p = 1 the odds are infinite; the clamp limits their gradient 1 / (1 - p) to 1e6 and zeroes it beyond.
    logp = logp.clamp(max=-1e-6)
    # expm1 keeps the digits of 1 - p near p = 1; elsewhere the rounding of log(1 - p) is small compared with logp.
    return logp - torch.log(-torch.expm1(logp))


@register("sft", paper="2411.10442", supports=["weight"], needs_reference=False, compares_sides=False)
class SFT(Loss):
    """Train on the likelihood of the chosen side (supervised fine-tuning).

    -mean pi_w: the generation loss of MPO (2411.10442), averaged per response, so pairs stay independent.
    """

    def __call__(self, pairs: PairScores) -> Tensor:
        return pairs.mean_chosen_nll

    def rewards(self, pairs: PairScores) -> ChosenRejected:
        return pairs.mean_logps
