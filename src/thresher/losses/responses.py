"""Losses on single labelled responses and on whole lists of ranked or scored responses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.errors import UserError
from thresher.losses.base import Loss
from thresher.losses.pairs import ExampleLogps, ObjectiveInputs
from thresher.losses.parameters import POSITIVE, STATE, parameter
from thresher.losses.registry import register


@dataclass(frozen=True)
class ResponseScores:
    """Sums of each response in fp64, [num_examples, num_sides]: the first response of each example, the second, ..."""

    logps: Tensor
    reference_logps: Tensor | None
    lengths: Tensor  #: scored tokens
    is_present: Tensor  #: False where an example has fewer responses than others
    values: Tensor  #: labels (1 desirable, 0 not) or scores; of ranked responses without scores, minus their rank
    point_of_step: float | None = None  #: KTO's z0 of the whole step, if the caller knows it

    @classmethod
    def of(cls, inputs: ObjectiveInputs, point_of_step: float | None = None) -> ResponseScores:
        logps, lengths = (
            _sums(inputs.policy, inputs.policy),
            torch.stack([side.lengths for side in inputs.policy.sides], 1),
        )
        reference = None if inputs.reference is None else _sums(inputs.reference, inputs.policy).detach()
        ranks = -torch.arange(logps.shape[1], dtype=logps.dtype, device=logps.device).expand_as(logps)
        values = ranks if inputs.values is None else inputs.values.to(logps.dtype)
        return cls(logps, reference, lengths, lengths > 0, values, point_of_step)

    @property
    def mean_logps(self) -> Tensor:
        return self.logps / self.lengths.clamp(min=1)

    @property
    def log_ratios(self) -> Tensor:
        """log(policy / reference) of each response."""
        if self.reference_logps is None:
            raise UserError("this loss compares the policy with a reference; set reference.mode to other than none")
        return self.logps - self.reference_logps

    @property
    def reference_point(self) -> Tensor:
        """KTO's z0, a scalar without gradient: the mean over the mismatched responses, the second ones, at least 0."""
        if self.point_of_step is not None or self.logps.shape[1] == 1:  # in a step of equal prompts there are none
            return self.logps.new_full((), self.point_of_step or 0.0)
        is_present = self.is_present[:, 1]
        mismatched = torch.where(is_present, self.log_ratios[:, 1].detach(), 0.0)
        return (mismatched.sum() / is_present.sum().clamp(min=1)).clamp(min=0.0)


def _sums(logps: ExampleLogps, policy: ExampleLogps) -> Tensor:
    sides = zip(logps.sides, policy.sides, strict=True)
    return torch.stack([side.sums(of_policy.weights) for side, of_policy in sides], 1)


class LabelLoss(Loss):
    """A loss on one labelled response per example."""

    def label_rewards(self, examples: ResponseScores) -> Tensor:
        """Compute the reward of each response: [num_examples]."""
        return self.beta * examples.log_ratios[:, 0]


@register("kto", paper="2402.01306", supports=["weight"], reads="labels", couples_pairs=True)
class KTO(LabelLoss):
    """Increase the utility of desirable responses and decrease the others', relative to a reference point.

    lambda_D (1 - sig(beta (r - z0))) or lambda_U (1 - sig(beta (z0 - r))): Eq. 8 of KTO (2402.01306). z0 estimates the
    KL divergence, max(0, mean r(x, y')), over the whole step, without gradient. Each y' answers a different prompt.
    """

    reads_mismatched: ClassVar[bool] = True
    beta: float = parameter(0.1, POSITIVE)
    desirable_weight: float = parameter(1.0, POSITIVE)
    undesirable_weight: float = parameter(1.0, POSITIVE)

    @property
    def zero_margin_loss(self) -> float | None:
        same = self.desirable_weight == self.undesirable_weight
        return 0.5 * self.desirable_weight if same else None

    def __call__(self, examples: ResponseScores) -> Tensor:
        is_desirable = examples.values[:, 0] > 0.5
        advantage = self.beta * (examples.log_ratios[:, 0] - examples.reference_point)
        # a tensor: where would round two numbers to fp32
        desirable_weight = torch.full_like(advantage, self.desirable_weight)
        weight = torch.where(is_desirable, desirable_weight, self.undesirable_weight)
        return weight * torch.sigmoid(torch.where(is_desirable, -advantage, advantage))


@register("bco", paper="2404.04656", supports=["weight"], reads="labels")
class BCO(LabelLoss):
    """Classify each response as good or bad relative to the mean reward.

    -logsig(beta r - delta) or -logsig(delta - beta r): BCO (2404.04656). delta is the mean reward of all responses in
    earlier steps, initially 0, as in `bco_pair`.
    """

    beta: float = parameter(0.1, POSITIVE)
    delta: float = field(default=0.0, metadata=STATE)
    num_examples_seen: int = field(default=0, metadata=STATE)

    @property
    def zero_margin_loss(self) -> float | None:
        return 0.6931471805599453  # ln 2

    def __call__(self, examples: ResponseScores) -> Tensor:
        advantage = self.label_rewards(examples) - self.delta
        return -F.logsigmoid(torch.where(examples.values[:, 0] > 0.5, advantage, -advantage))

    def after_step(self, chosen_reward_sum: float, rejected_reward_sum: float, num_pairs: int) -> Self:
        """Add one step to the running mean; the sums are over all ranks."""
        if num_pairs == 0:
            return self
        seen = self.num_examples_seen + num_pairs
        step_mean = (chosen_reward_sum + rejected_reward_sum) / num_pairs
        delta = self.delta + (step_mean - self.delta) * num_pairs / seen
        return replace(self, delta=delta, num_examples_seen=seen)


@register("apo_zero_unpaired", paper="2408.06266", supports=["weight"], reads="labels")
class APOZeroUnpaired(LabelLoss):
    """Make desirable responses more likely and others less likely.

    1 - sig(beta r) or sig(beta r): each side of Eq. 7 of APO (2408.06266) alone.
    """

    beta: float = parameter(0.1, POSITIVE)

    @property
    def zero_margin_loss(self) -> float | None:
        return 0.5

    def __call__(self, examples: ResponseScores) -> Tensor:
        rewards = self.label_rewards(examples)
        return torch.sigmoid(torch.where(examples.values[:, 0] > 0.5, -rewards, rewards))


class ListLoss(Loss):
    """A loss on all responses of an example, the best first."""

    @property
    def zero_margin_loss(self) -> float | None:
        return None  # it depends on the number of responses


@register("plackett_luce", paper="2305.18290", supports=["weight"], reads="lists")
class PlackettLuce(ListLoss):
    """Fit the policy as an implicit Plackett-Luce reward model of the whole ranking.

    -sum_k log(exp(beta r_k) / sum_{j >= k} exp(beta r_j)): Eq. 20 of DPO (2305.18290, appendix A.3). Two responses give
    `sigmoid`. Of equally good responses none is ranked above another: neither is in the denominator of the other.
    """

    beta: float = parameter(0.1, POSITIVE)

    def __call__(self, examples: ResponseScores) -> Tensor:
        rewards, values = self.beta * examples.log_ratios, examples.values
        # [num_examples, k, j]: whether response j is worse than response k, or is k itself; an absent k has itself only
        competes = (values[:, None, :] < values[:, :, None]) & examples.is_present[:, None, :]
        competes &= examples.is_present[:, :, None]
        competes |= torch.eye(values.shape[1], dtype=torch.bool, device=values.device)
        choices = rewards[:, None, :].masked_fill(~competes, -torch.inf).logsumexp(2)
        return (choices - rewards).sum(1)


@register("infonca", paper="2402.05369", supports=["weight"], reads="lists")
class InfoNCA(ListLoss):
    """Match the distribution that the scores define over the responses of a prompt.

    -sum_k softmax(s / alpha)_k log softmax(beta r)_k: InfoNCA (2402.05369, Eq. 8), with the scores s of the data.
    """

    beta: float = parameter(0.1, POSITIVE)
    infonca_alpha: float = parameter(1.0, POSITIVE)

    def __call__(self, examples: ResponseScores) -> Tensor:
        is_absent = ~examples.is_present
        scores = (examples.values / self.infonca_alpha).masked_fill(is_absent, -torch.inf)
        rewards = (self.beta * examples.log_ratios).masked_fill(is_absent, -torch.inf)
        log_shares = F.log_softmax(rewards, 1).masked_fill(is_absent, 0.0)
        return -(F.softmax(scores, 1) * log_shares).sum(1)
