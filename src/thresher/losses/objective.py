"""The objective of a run: losses, their weights and the modifiers, checked against each other once.

It decides which combinations make sense. It leaves to its caller: gathering the whole step where `couples_pairs`, the
division by the number of pairs, and the reduction of metrics over ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thresher.errors import UserError
from thresher.losses.knobs import require_knob
from thresher.losses.metrics import MetricSum, measure, wide
from thresher.losses.modifiers.f_divergence import FDivergence
from thresher.losses.modifiers.mixture import mixture
from thresher.losses.modifiers.pair_data import weighted
from thresher.losses.modifiers.rpo import rpo_term
from thresher.losses.modifiers.wpo import pair_weights
from thresher.losses.pairs import PairLogps
from thresher.losses.protocol import Loss, Modifier, StatefulLoss
from thresher.losses.registry import loss_class, loss_names
from thresher.losses.scores import PairScores, score_pairs


@dataclass(frozen=True)
class ObjectiveOutput:
    """per_pair: [num_pairs] with grad, weighted but not divided by anything; metrics: detached (sum, count)."""

    per_pair: Tensor
    metrics: dict[str, MetricSum]


@dataclass(frozen=True)
class Objective:
    """Turn logps into losses and metrics. The defaults of all modifiers leave the losses as published.

    terms: (loss, weight), summed. f_divergence, f_alpha_divergence_coef: f-DPO. ld_alpha: LD-DPO, off at 1.
    length_penalty: R-DPO's alpha. rpo_alpha: weight of the chosen side's NLL. wpo: weigh by likelihood.
    """

    terms: tuple[tuple[Loss, float], ...]
    f_divergence: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float = 1.0
    length_penalty: float = 0.0
    rpo_alpha: float = 0.0
    wpo: bool = False

    def __post_init__(self) -> None:
        if not self.terms:
            raise UserError(f"an objective needs at least one loss; the losses are {', '.join(loss_names())}")
        names = [loss.name for loss, _ in self.terms]
        if len(set(names)) != len(names):
            raise UserError(f"a loss may appear once in a sum, got {' + '.join(names)}; add up its weights instead")
        for loss, weight in self.terms:
            require_knob(loss.name, "weight in the sum of losses", weight, above=0.0, usual=1.0)
        FDivergence(self.f_divergence, self.f_alpha_divergence_coef)
        require_knob("LD-DPO", "ld_alpha", self.ld_alpha, at_least=0.0, at_most=1.0, usual=0.5)
        require_knob("R-DPO", "length_penalty", self.length_penalty, at_least=0.0, usual=0.01)
        require_knob("RPO", "rpo_alpha", self.rpo_alpha, at_least=0.0, usual=1.0)
        self._check_supported("f_divergence", self.f_divergence != "reverse_kl")
        self._check_supported("ld_alpha", self.ld_alpha != 1.0)
        self._check_supported("length_penalty", self.length_penalty != 0.0)
        self._check_supported("wpo", self.wpo)

    @property
    def needs_reference(self) -> bool:
        return any(loss.needs_reference for loss, _ in self.terms)

    @property
    def couples_pairs(self) -> bool:
        """Say whether the caller must pass all pairs of a step at once."""
        return any(loss.couples_pairs for loss, _ in self.terms)

    @property
    def needs_log_collision(self) -> bool:
        return self.wpo

    @property
    def zero_margin_loss(self) -> float | None:
        """Say what a pair of weight 1 without a margin costs when policy == reference; None where it depends."""
        if self.length_penalty or self.rpo_alpha or self.wpo:
            return None
        total = 0.0
        for loss, weight in self.terms:
            if loss.zero_margin_loss is None:
                return None
            total += weight * loss.zero_margin_loss
        return total

    def check_columns(self, *, weight: bool, margin: bool) -> None:
        """Refuse, before a run starts, columns of the data that one of the losses would ignore."""
        self._check_supported("margin", margin)
        self._check_supported("weight", weight)

    def __call__(self, pairs: PairLogps) -> ObjectiveOutput:
        """Compute the loss of each pair and the metrics."""
        self.check_columns(weight=pairs.weight is not None, margin=pairs.margin is not None)
        scores = score_pairs(
            pairs,
            f_divergence=FDivergence(self.f_divergence, self.f_alpha_divergence_coef),
            ld_alpha=self.ld_alpha,
            length_penalty=self.length_penalty,
        )
        per_pair = mixture(self.terms, scores)
        if self.rpo_alpha:
            per_pair = per_pair + rpo_term(scores, self.rpo_alpha)
        if self.wpo:
            per_pair = per_pair * pair_weights(pairs.policy)
        per_pair = weighted(per_pair, pairs.weight)
        with torch.no_grad():
            metrics = measure(pairs, per_pair, self._rewarding_loss.rewards(scores))
            metrics.update(self._state_metrics(scores))
        return ObjectiveOutput(per_pair, metrics)

    def advanced(self, metrics: Mapping[str, MetricSum]) -> "Objective":
        """Take a finished step's metrics, reduced over all ranks, into the losses that keep state."""
        return self._map_stateful(
            lambda name, loss: loss.advanced(
                float(metrics[f"{name}/chosen_reward"].sum),
                float(metrics[f"{name}/rejected_reward"].sum),
                int(metrics[f"{name}/chosen_reward"].count),
            )
        )

    def state(self) -> dict[str, dict[str, float]]:
        """Return what a checkpoint must keep, by loss; empty without a stateful loss."""
        return {loss.name: loss.state() for loss, _ in self.terms if isinstance(loss, StatefulLoss)}

    def with_state(self, state: Mapping[str, Mapping[str, float]]) -> "Objective":
        """Return this objective as it was when `state` was saved."""
        if set(state) != set(self.state()):
            raise UserError(
                f"the saved loss state is for {sorted(state) or 'no loss'}, this objective keeps state for "
                f"{sorted(self.state()) or 'no loss'}; resume with the losses that the checkpoint was made with"
            )
        return self._map_stateful(lambda name, loss: loss.with_state(state[name]))

    def _map_stateful(self, change: Callable[[str, StatefulLoss], Loss]) -> "Objective":
        terms = tuple(
            (change(loss.name, loss) if isinstance(loss, StatefulLoss) else loss, weight) for loss, weight in self.terms
        )
        return replace(self, terms=terms)

    def _state_metrics(self, scores: PairScores) -> dict[str, MetricSum]:
        metrics: dict[str, MetricSum] = {}
        for loss, _ in self.terms:
            if isinstance(loss, StatefulLoss):
                chosen, rejected = loss.rewards(scores)
                metrics[f"{loss.name}/chosen_reward"] = MetricSum(wide(chosen).sum(), scores.num_pairs)
                metrics[f"{loss.name}/rejected_reward"] = MetricSum(wide(rejected).sum(), scores.num_pairs)
        return metrics

    @property
    def _rewarding_loss(self) -> Loss:
        # rewards of different losses have different units, so one loss speaks for all: the first that has an opinion.
        return next((loss for loss, _ in self.terms if loss.compares_sides), self.terms[0][0])

    def _check_supported(self, modifier: Modifier, is_on: bool) -> None:
        """Refuse a modifier that one of the losses would ignore; a loss of the chosen side alone has no say."""
        if not is_on:
            return
        judges = [loss for loss, _ in self.terms if loss.compares_sides] or [loss for loss, _ in self.terms]
        deaf = [loss.name for loss in judges if modifier not in loss.supports]
        if deaf:
            able = [name for name in loss_names() if modifier in loss_class(name).supports]
            raise UserError(
                f"{_LABELS[modifier]} does not act on {', '.join(deaf)}; "
                f"turn it off, or use a loss that supports it: {', '.join(able)}"
            )


_LABELS: dict[Modifier, str] = {
    "f_divergence": "f_divergence other than reverse_kl",
    "ld_alpha": "ld_alpha (LD-DPO)",
    "length_penalty": "length_penalty (R-DPO)",
    "margin": "a margin column in the data",
    "weight": "a weight column in the data",
    "wpo": "wpo",
}
