"""Trainer state beside the weights: counters, and the metrics that are not logged yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thresher.losses.metrics import MetricSum, merge_metrics
from thresher.strategies.engine import StepOutcome


@dataclass
class TrainerState:
    """Counters of a run, saved in checkpoints; the field names are the keys of `trainer.json`.

    step: completed optimizer steps, including skipped ones. skipped_in_a_row: without overflows of fp16. window: metric
    sums since the last logged step.
    """

    step: int = 0
    pairs_seen: int = 0
    useful_tokens_seen: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    grad_norm: float = 0.0
    window: dict[str, MetricSum] = field(default_factory=dict)

    def record_step(self, num_pairs: int, outcome: StepOutcome) -> None:
        """Count a step; a skipped one adds no pairs, tokens or metrics."""
        self.step += 1
        self.grad_norm = outcome.grad_norm
        if outcome.skipped:
            self.skipped_steps += 1
            self.skipped_in_a_row += outcome.failed
            return
        self.skipped_in_a_row = 0
        self.pairs_seen += num_pairs
        self.useful_tokens_seen += outcome.tokens.useful
        tokens = {f"tokens/{kind}": MetricSum(number, 1) for kind, number in vars(outcome.tokens).items()}
        self._add_to_window(outcome.metrics | tokens)

    def _add_to_window(self, metrics: Mapping[str, MetricSum]) -> None:
        floats = {name: MetricSum(float(m.sum), float(m.count)) for name, m in metrics.items()}
        self.window = merge_metrics([self.window, floats])

    def pop_means(self) -> dict[str, float]:
        """Return the means since the last call, without those of no pair, and start a new window."""
        means = {name: metric.mean for name, metric in self.window.items() if metric.count}
        self.window = {}
        return means

    def to_json(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "window"}
        return values | {"window": {name: [m.sum, m.count] for name, m in self.window.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainerState:
        window = {name: MetricSum(total, count) for name, (total, count) in values["window"].items()}
        return cls(**{**values, "window": window})
