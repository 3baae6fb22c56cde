"""Metrics through Ray's metrics API, which the agent of each node exports to Prometheus.

Ray writes `ray_` before the names. They are a fixed set, and labels are the run, the set of pairs, the role and the
rank. Setting a value takes microseconds and waits for nothing: Ray sends the values from a thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from thresher.observability.log_files import RECOVERIES
from thresher.observability.trackers.tracker import RunInfo, Status, Table

if TYPE_CHECKING:
    from pathlib import Path

# metrics of training and, with the prefix eval/, of validation pairs
_OF_PAIRS = {
    "loss": "loss",
    "rewards/accuracies": "reward_accuracy",
    "rewards/margins": "reward_margin",
    "rewards/chosen": "reward_chosen",
    "rewards/rejected": "reward_rejected",
    "logps/chosen": "logps_chosen",
    "logps/rejected": "logps_rejected",
    "sft_loss": "sft_loss",
    "kl": "kl",
    "entropy": "entropy",
}
_OF_RUN = {
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "epoch": "epoch",
    "pairs_seen": "pairs_seen",
    "tokens/seen": "tokens_seen",
    "skipped_steps": "skipped_steps",
    "pairs_per_second": "pairs_per_second",
    "useful_tokens_per_second": "tokens_per_second",
    "time/evaluate": "evaluation_seconds",
}
_OF_RANK = {
    "time/step": "step_seconds",
    "time/wait_reference": "wait_reference_seconds",
    "time/save": "checkpoint_seconds",  # for which training stops
}
_MEMORY = ("rss", "cuda_allocated", "cuda_reserved")


class _Gauges:
    """Gauges by name, made when they are first set."""

    def __init__(self, **labels: str):
        self._labels = labels
        self._gauges: dict[str, Any] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        from ray.util.metrics import Gauge  # without Ray, nothing calls this

        labels |= self._labels
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"thresher_{name}", tag_keys=tuple(labels))
        self._gauges[name].set(float(value), labels)


class RayMetricsTracker:
    """Metrics of a run, set by the process that leads it; always on in a run on Ray.

    Points have no step: after a resume, the step and the metrics go back to those of the checkpoint.
    """

    name = "ray"

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Set what is known before the first step."""
        self._gauges = _Gauges(run=run.exp_name)
        self._recoveries = run.run_dir / RECOVERIES
        self._gauges.set("total_steps", run.total_steps)
        self._gauges.set("step", max(0, resume_step or 0))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the metrics that Prometheus gets; names of subsets and health rules are not among them."""
        self._gauges.set("step", step)
        self._gauges.set("recoveries", _count_lines(self._recoveries))
        for name, value in metrics.items():
            if (own := _OF_RUN.get(name)) is not None:
                self._gauges.set(own, value)
                continue
            part, is_evaluation, rest = name.rpartition("eval/")
            if (own := _OF_PAIRS.get(rest)) is not None and not part:
                self._gauges.set(own, value, split="eval" if is_evaluation else "train")

    def log_table(self, step: int, table: Table) -> None:
        """Do nothing: Prometheus has no texts."""

    def close(self, status: Status) -> None:
        """Do nothing: Ray drops the metrics when the process ends."""


def _count_lines(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


class RankMetrics:
    """Metrics of one worker, which are set in its process."""

    def __init__(self, run: str, role: str, rank: int):
        self._gauges = _Gauges(run=run, role=role, rank=str(rank))

    def record(self, metrics: Mapping[str, float]) -> None:
        """Set the metrics that differ between ranks."""
        for name, own in _OF_RANK.items():
            if name in metrics:
                self._gauges.set(own, metrics[name])
        for kind in _MEMORY:
            if (gigabytes := metrics.get(f"memory/peak_{kind}_gb")) is not None:
                self._gauges.set("peak_memory_bytes", gigabytes * 1e9, kind=kind)
