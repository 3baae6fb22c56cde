"""A run's objective: a weighted sum of losses with modifiers, validated once.

It rejects combinations in which a setting has no effect. The caller gathers the whole step if `couples_pairs`, divides
by the number of pairs, and reduces metrics over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thresher.errors import UserError
from thresher.losses.base import Loss, Modifier, Reads
from thresher.losses.comparisons import Compared, Comparisons, compare
from thresher.losses.metrics import MetricSum, compute_metrics, entropy_metric, label_metrics, pair_rewards
from thresher.losses.pairs import ExampleLogps, ObjectiveInputs, TokenStatistics, to_fp64
from thresher.losses.parameters import NON_NEGATIVE, POSITIVE, Range
from thresher.losses.registry import loss_class, loss_names, parameter_defaults
from thresher.losses.responses import LabelLoss, ResponseScores
from thresher.losses.scores import ChosenRejected, FDivergence, PairScores, score_pairs, wpo_weights


@dataclass(frozen=True)
class ObjectiveOutput:
    """Losses and metrics of some pairs."""

    per_pair: Tensor  #: [num_pairs] with grad in the dtype of the logps, weighted, not averaged
    metrics: dict[str, MetricSum]  #: detached


@dataclass(frozen=True)
class Objective:
    """Compute losses and metrics from logps. By default all modifiers are off and the losses are as published."""

    terms: tuple[tuple[Loss, float], ...]  #: (loss, weight), summed as in MPO (2411.10442)
    f_divergence: str = "reverse_kl"  #: f-DPO
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float = 1.0  #: LD-DPO, off at 1
    length_penalty: float = 0.0  #: R-DPO's alpha
    #: weight of the chosen side's mean NLL per token: Eq. 1 of Iterative Reasoning Preference Optimization (2404.19733)
    rpo_alpha: float = 0.0
    wpo: bool = False  #: weigh pairs by the policy's likelihood
    margin: float = 0.0  #: subtracted from every reward margin, as SimPO's gamma, in units of reward
    #: compare with a reference that gives every response the same probability, so log ratios are logps
    reference_free: bool = False
    #: humanline: least and greatest log ratio of a token, off if None
    clamp_log_ratio: tuple[float, float] | None = None
    measures_entropy: bool = False  #: adds the metric `entropy`; changes no loss
    comparisons: Comparisons = "all"  #: the pairs of an example with more than two responses
    reference_point: float | None = None  #: KTO's z0 of the whole step, if the caller knows it
    reads_labels: bool = False  #: single responses, even for losses of a pair's chosen side, such as sft
    #: names of groups of examples whose loss and rewards are measured separately too
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.terms:
            raise UserError(f"an objective needs at least one loss; the losses are {', '.join(loss_names())}")
        names = [loss.name for loss, _ in self.terms]
        if len(set(names)) != len(names):
            raise UserError(
                f"a loss may appear only once in a sum, got {' + '.join(names)}; add up its weights instead"
            )
        for loss, weight in self.terms:
            POSITIVE.check(loss.name, "weight in the sum of losses", weight, usual=1.0)
        comparing = [loss.name for loss, _ in self.terms if loss.reads != "labels" and loss.compares_sides]
        if self.reads == "labels" and comparing:
            raise UserError(
                f"{comparing[0]} compares the responses to a prompt, but the data, or another loss of the sum, has "
                "single responses with a label; use losses of one kind (`thresher losses` lists them), or join "
                "labelled rows to pairs with actor_train.data_args.join_labelled=true"
            )
        without_rewards = [loss.name for loss, _ in self.terms if not loss.trains_rewards]
        if self.trains_rewards and (without_rewards or self.rpo_alpha):
            other = without_rewards[0] if without_rewards else "rpo_alpha"
            raise UserError(
                f"bradley_terry trains a reward model, which has no log-probabilities for {other}; train it alone"
            )
        if self.reads != "pairs" and (self.rpo_alpha or self.wpo):
            raise UserError(f"rpo_alpha and use_wpo need a loss on pairs, got {' + '.join(names)}; turn them off")
        FDivergence(self.f_divergence, self.f_alpha_divergence_coef)
        Range(at_least=0.0, at_most=1.0).check("LD-DPO", "ld_alpha", self.ld_alpha, usual=0.5)
        NON_NEGATIVE.check("R-DPO", "length_penalty", self.length_penalty, usual=0.01)
        NON_NEGATIVE.check("RPO", "rpo_alpha", self.rpo_alpha, usual=1.0)
        if self.clamp_log_ratio is not None:
            low, high = self.clamp_log_ratio
            Range(below=0.0).check("humanline", "lower bound of clamp_log_ratio", low, usual=-1.0)
            POSITIVE.check("humanline", "upper bound of clamp_log_ratio", high, usual=1.5)
            if self.reference_free:
                raise UserError("clamp_log_ratio needs a reference; remove it, or set reference.mode")
        self._check_supported("clamp_log_ratio", self.clamp_log_ratio is not None)
        self._check_supported("f_divergence", self.f_divergence != "reverse_kl")
        self._check_supported("ld_alpha", self.ld_alpha != 1.0)
        self._check_supported("length_penalty", self.length_penalty != 0.0)
        self._check_supported("wpo", self.wpo)
        self._check_supported("gamma", self.margin != 0.0)
        self._check_supported("reference_free", self.reference_free)

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free and any(loss.needs_reference for loss, _ in self.terms)

    @property
    def couples_pairs(self) -> bool:
        """True if the caller must pass all pairs of a step at once."""
        knows_point = self.reference_point is not None
        return any(loss.couples_pairs and not (loss.reads_mismatched and knows_point) for loss, _ in self.terms)

    @property
    def reads(self) -> Reads:
        """What the losses read; pairwise losses read the comparisons of a list too."""
        kinds = {loss.reads for loss, _ in self.terms}
        return "labels" if self.reads_labels or "labels" in kinds else "lists" if "lists" in kinds else "pairs"

    @property
    def trains_rewards(self) -> bool:
        """True if the policy is a reward model."""
        return any(loss.trains_rewards for loss, _ in self.terms)

    @property
    def reads_mismatched(self) -> bool:
        """True if each example needs a second response, which answers a different prompt."""
        return any(loss.reads_mismatched for loss, _ in self.terms)

    @property
    def statistics(self) -> TokenStatistics:
        """Statistics with which the caller must score the policy."""
        return TokenStatistics(squared_probs=self.wpo, entropy=self.measures_entropy)

    @property
    def zero_margin_loss(self) -> float | None:
        """The loss of a pair of weight 1 without a margin when policy == reference; None if it is not a constant."""
        if self.length_penalty or self.rpo_alpha or self.wpo or self.margin or self.reference_free:
            return None
        total = 0.0
        for loss, weight in self.terms:
            if loss.zero_margin_loss is None:
                return None
            total += weight * loss.zero_margin_loss
        return total

    def describe(self) -> str:
        """The formula in one line: losses with their parameters and weights, then the modifiers that are on."""
        # a parameter of 0 is off and left out, and so is the weight of a single loss if it is 1
        terms = []
        for loss, weight in self.terms:
            values = {name: getattr(loss, name) for name in parameter_defaults(loss.name)}
            given = ", ".join(f"{name}={value:g}" for name, value in values.items() if value)
            factor = "" if len(self.terms) == 1 and weight == 1.0 else f"{float(weight)} * "
            terms.append(f"{factor}{loss.name}" + (f"({given})" if given else ""))
        if self.rpo_alpha:
            terms.append(f"{float(self.rpo_alpha)} * RPO NLL")
        coef = f" ({self.f_alpha_divergence_coef:g})" if self.f_divergence == "alpha_divergence" else ""
        modifiers = {
            f"f_divergence {self.f_divergence}{coef}": self.f_divergence != "reverse_kl",
            f"log ratios clamped to {self.clamp_log_ratio}": self.clamp_log_ratio,
            f"ld_alpha {self.ld_alpha:g} (LD-DPO)": self.ld_alpha != 1.0,
            f"length_penalty {self.length_penalty:g} (R-DPO)": self.length_penalty,
            f"gamma {self.margin:g}": self.margin,
            "pairs weighted by WPO": self.wpo,
            "reference-free": self.reference_free,
            f"comparisons {self.comparisons}": self.comparisons != "all",
        }
        return ", ".join([" + ".join(terms), *(text for text, is_on in modifiers.items() if is_on)])

    def check_columns(self, *, weight: bool, margin: bool) -> None:
        """Reject, before a run starts, data columns that one of the losses would ignore."""
        self._check_supported("margin", margin)
        self._check_supported("weight", weight)

    def __call__(self, inputs: ObjectiveInputs) -> ObjectiveOutput:
        """Compute the loss of each pair and the metrics."""
        self.check_columns(weight=inputs.weight is not None, margin=inputs.margin is not None)
        if self.reads == "labels":
            per_pair, metrics = self._of_labels(inputs)
        else:
            per_pair, metrics = self._of_comparisons(inputs)
        return ObjectiveOutput(per_pair, metrics)

    def _by_group(
        self, inputs: ObjectiveInputs, values: Mapping[str, Tensor], counts: Mapping[str, Tensor]
    ) -> dict[str, MetricSum]:
        """Sum values of examples over each group; an example counts as often as its count says, once without one."""
        if not self.groups:
            return {}
        if any(loss.couples_pairs and not loss.reads_mismatched for loss, _ in self.terms):
            # such as that of sorted margins, which belongs to no pair
            values = {name: each for name, each in values.items() if name != "loss"}
        # a rank without examples still has the names; a matrix product, because index_add differs from run to run
        group = inputs.policy.chosen.lengths[:0] if inputs.group is None else inputs.group
        is_in = to_fp64(group[:, None] == torch.arange(len(self.groups), device=group.device))
        sums = torch.stack([to_fp64(each) for each in values.values()]) @ is_in
        every = torch.ones(len(group), device=group.device)
        totals = torch.stack([to_fp64(counts.get(name, every)) for name in values]) @ is_in
        return {
            f"{name}/{metric}": MetricSum(sums[row, at], totals[row, at])
            for at, name in enumerate(self.groups)
            for row, metric in enumerate(values)
        }

    def _of_comparisons(self, inputs: ObjectiveInputs) -> tuple[Tensor, dict[str, MetricSum]]:
        compared = compare(inputs, self.comparisons)
        scores = self._score_pairs(compared.inputs)
        # a likelihood term trains on the best response of a list, whatever is compared
        of_best = scores if compared.is_valid is None else _with_best_response(scores, inputs)
        losses = [
            weight * loss(scores if loss.compares_sides else of_best)
            for loss, weight in self.terms
            if loss.reads == "pairs"
        ]
        if self.rpo_alpha:
            # Keeps the chosen side likely: the margin cannot be increased by lowering both sides.
            losses.append(self.rpo_alpha * of_best.mean_chosen_nll)
        if self.wpo:
            losses = [_sum(losses) * wpo_weights(compared.inputs.policy)]
        terms = [compared.per_example(_sum(losses), inputs.num_pairs)] if losses else []
        if self.reads == "lists":
            responses = ResponseScores.of(inputs)
            terms += [weight * loss(responses) for loss, weight in self.terms if loss.reads == "lists"]
        per_pair = _weighted(_sum(terms), inputs)
        with torch.no_grad():
            metrics = {"loss": MetricSum(to_fp64(per_pair).sum(), inputs.num_pairs)}
            rewards = self._rewards(scores)
            metrics.update(compute_metrics(compared.inputs, rewards, compared.is_valid))
            metrics.update(entropy_metric(inputs.policy))
            metrics.update(self._state_metrics(scores, compared.is_valid))
            if self.trains_rewards:  # the others describe log-probabilities
                metrics = {name: metric for name, metric in metrics.items() if name.startswith(("loss", "rewards/"))}
            metrics.update(self._comparisons_by_group(inputs, per_pair, compared, rewards))
        return per_pair, metrics

    def _comparisons_by_group(
        self, inputs: ObjectiveInputs, per_pair: Tensor, compared: Compared, rewards: ChosenRejected
    ) -> dict[str, MetricSum]:
        if not self.groups:
            return {}
        found = pair_rewards(compared.inputs, rewards)
        if (is_valid := compared.is_valid) is None:
            return self._by_group(inputs, {"loss": per_pair, **found}, {})
        # the sums over the comparisons of each example
        shape = (-1, inputs.num_pairs) if inputs.num_pairs else (1, 0)
        sums = {name: torch.where(is_valid, each, 0.0).view(shape).sum(0) for name, each in found.items()}
        return self._by_group(inputs, {"loss": per_pair, **sums}, dict.fromkeys(sums, is_valid.view(shape).sum(0)))

    def _of_labels(self, inputs: ObjectiveInputs) -> tuple[Tensor, dict[str, MetricSum]]:
        responses = ResponseScores.of(inputs, self.reference_point)
        labels = responses.values[:, 0]
        # a loss of the chosen side, such as sft, trains on desirable responses
        chosen = score_pairs(ObjectiveInputs(ExampleLogps.of(inputs.policy.side(0), inputs.policy.side(1))))
        terms = [
            weight * (loss(responses) if loss.reads == "labels" else loss(chosen) * labels)
            for loss, weight in self.terms
        ]
        per_pair = _weighted(_sum(terms), inputs)
        with torch.no_grad():
            rewards = self.label_rewards(responses)
            reference = None if inputs.reference is None else inputs.reference.chosen
            metrics = label_metrics(inputs.policy.chosen, reference, per_pair, rewards, labels)
            metrics.update(entropy_metric(ExampleLogps.of(inputs.policy.chosen)))
            metrics.update(self._label_state_metrics(responses))
            is_desirable = labels > 0.5
            has_label = {"rewards/chosen": is_desirable, "rewards/rejected": ~is_desirable}
            by_label = {name: torch.where(has, rewards, 0.0) for name, has in has_label.items()}
            values = {"loss": per_pair, "labels/desirable": is_desirable, **by_label}
            metrics.update(self._by_group(inputs, values, has_label))
            if self.reads_mismatched:
                count = inputs.num_pairs
                metrics["kto/z0"] = MetricSum(responses.reference_point * count, count)
        return per_pair, metrics

    @torch.no_grad()
    def rewards(self, inputs: ObjectiveInputs) -> ChosenRejected:
        """Compute the rewards of each pair, as the metrics average them; for one part of coupled pairs too."""
        return self._rewards(self._score_pairs(inputs))

    def _score_pairs(self, inputs: ObjectiveInputs) -> PairScores:
        return score_pairs(
            inputs,
            f_divergence=FDivergence(self.f_divergence, self.f_alpha_divergence_coef),
            ld_alpha=self.ld_alpha,
            length_penalty=self.length_penalty,
            margin=self.margin,
            reference_free=self.reference_free,
            clamp_log_ratio=self.clamp_log_ratio,
        )

    def label_rewards(self, responses: ResponseScores) -> Tensor:
        losses = [loss for loss, _ in self.terms if isinstance(loss, LabelLoss)]
        return losses[0].label_rewards(responses) if losses else responses.mean_logps[:, 0]

    def _rewards(self, scores: PairScores) -> ChosenRejected:
        # Units differ between losses, so report the rewards of the first loss that compares both sides.
        return self._comparing[0].rewards(scores)

    def after_step(self, metrics: Mapping[str, MetricSum]) -> Objective:
        """Return this objective with its losses' state updated from a step's metrics, reduced over all ranks."""
        return self._map_stateful(
            lambda loss: loss.after_step(
                float(metrics[f"{loss.name}/chosen_reward"].sum),
                float(metrics[f"{loss.name}/rejected_reward"].sum),
                int(metrics[f"{loss.name}/chosen_reward"].count),
            )
        )

    def state(self) -> dict[str, dict[str, float]]:
        """Return the state that a checkpoint must keep, by loss; empty without a stateful loss."""
        return {loss.name: loss.state() for loss, _ in self.terms if loss.state()}

    def with_state(self, state: Mapping[str, Mapping[str, float]]) -> Objective:
        """Return this objective with its losses' state restored."""
        if set(state) != set(self.state()):
            raise UserError(
                f"the saved loss state is for {sorted(state) or 'no loss'}, but this objective keeps state for "
                f"{sorted(self.state()) or 'no loss'}; resume with the losses that the checkpoint was made with"
            )
        return self._map_stateful(lambda loss: loss.with_state(state[loss.name]))

    def _map_stateful(self, change: Callable[[Loss], Loss]) -> Objective:
        return replace(
            self, terms=tuple((change(loss) if loss.state() else loss, weight) for loss, weight in self.terms)
        )

    def _state_metrics(self, scores: PairScores, is_valid: Tensor | None) -> dict[str, MetricSum]:
        valid, count = (1.0, scores.num_pairs) if is_valid is None else (is_valid, is_valid.sum())
        metrics: dict[str, MetricSum] = {}
        for loss, _ in self.terms:
            if loss.state():
                chosen, rejected = loss.rewards(scores)
                metrics[f"{loss.name}/chosen_reward"] = MetricSum((chosen * valid).sum(), count)
                metrics[f"{loss.name}/rejected_reward"] = MetricSum((rejected * valid).sum(), count)
        return metrics

    def _label_state_metrics(self, responses: ResponseScores) -> dict[str, MetricSum]:
        metrics: dict[str, MetricSum] = {}
        is_desirable = responses.values[:, 0] > 0.5
        for loss, _ in self.terms:
            if isinstance(loss, LabelLoss) and loss.state():
                rewards = loss.label_rewards(responses)
                for name, has_label in (("chosen", is_desirable), ("rejected", ~is_desirable)):
                    metrics[f"{loss.name}/{name}_reward"] = MetricSum((rewards * has_label).sum(), rewards.numel())
        return metrics

    @property
    def _comparing(self) -> list[Loss]:
        """The losses that compare both sides; all losses if none does."""
        losses = [loss for loss, _ in self.terms]
        return [loss for loss in losses if loss.compares_sides] or losses

    def _check_supported(self, modifier: Modifier, is_on: bool) -> None:
        """Reject a modifier that a comparing loss would ignore; a loss of the chosen side next to one may ignore it."""
        unsupported = [loss.name for loss in self._comparing if modifier not in loss.supports]
        if is_on and unsupported:
            supported_by = [name for name in loss_names() if modifier in loss_class(name).supports]
            raise UserError(
                f"{_LABELS[modifier]} has no effect on {', '.join(unsupported)}; "
                f"turn it off, or use a loss that supports it: {', '.join(supported_by)}"
            )


def _with_best_response(scores: PairScores, inputs: ObjectiveInputs) -> PairScores:
    """Replace both sides of each comparison by the best response of its list, as one token of the mean logp.

    Of several equally good responses, it is the mean of their means.
    """
    responses = ResponseScores.of(inputs)
    is_best = responses.is_present & (responses.values == responses.values[:, :1])
    mean = torch.where(is_best, responses.mean_logps, 0.0).sum(1) / is_best.sum(1).clamp(min=1)
    mean = mean.repeat(scores.num_pairs // inputs.num_pairs)
    both, one_token = ChosenRejected(mean, mean), torch.ones_like(mean)
    return replace(scores, logps=both, chosen_nll=-mean, lengths=ChosenRejected(one_token, one_token))


def _sum(losses: list[Tensor]) -> Tensor:
    total = losses[0]
    for each in losses[1:]:
        total = total + each
    return total


def _weighted(per_pair: Tensor, inputs: ObjectiveInputs) -> Tensor:
    if inputs.weight is not None:
        # The caller divides by the number of pairs, not by the sum of weights.
        per_pair = per_pair * inputs.weight.to(per_pair.dtype)
    # A loss beyond the range of the logps' dtype must be non-finite: its gradient would not fit either.
    return per_pair.to(inputs.policy.chosen.values.dtype)


_LABELS: dict[Modifier, str] = {
    "clamp_log_ratio": "clamp_log_ratio (humanline)",
    "f_divergence": "f_divergence other than reverse_kl",
    "ld_alpha": "ld_alpha (LD-DPO)",
    "length_penalty": "length_penalty (R-DPO)",
    "gamma": "gamma",
    "margin": "a margin column in the data",
    "reference_free": "reference.mode=none (reference-free)",
    "weight": "a weight column in the data",
    "wpo": "wpo",
}
