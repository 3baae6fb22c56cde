"""Metrics through Ray's metrics API, which the agent of each node exports to Prometheus.

Ray writes `ray_` before the names. They are a fixed set, and labels are the run, the set of pairs, the role and the
rank. Setting a value takes microseconds and waits for nothing: Ray sends the values from a thread of its own.
"""

from __future__ import annotations

import threading
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


class Gauges:
    """Gauges by name, made when they are first set, in a process that is connected to Ray.

    Ray's agent drops a gauge that is not set again within two of its intervals (10 seconds each, at least 1), and a
    step or the time between two evaluations may be longer: a thread sets all of them again every second.
    """

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}
        self._gauges: dict[str, Any] = {}
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="metrics for Ray", daemon=True)
        self._thread.start()

    def start(self, **labels: str) -> None:
        """Forget the values of an earlier run, and label those of the next one."""
        self._values, self._labels = {}, labels

    def set(self, name: str, value: float, **labels: str) -> None:
        from ray.util.metrics import Gauge  # without Ray, nothing calls this

        labels |= self._labels
        if name not in self._gauges:
            self._gauges[name] = Gauge(f"thresher_{name}", tag_keys=tuple(labels))
        self._gauges[name].set(float(value), labels)
        self._values[name, tuple(labels.items())] = float(value)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._is_closed.wait(1.0):
            for (name, labels), value in list(self._values.items()):
                self._gauges[name].set(value, dict(labels))


class RayMetricsTracker:
    """Metrics of a run, set by the process that leads it; always on in a run on Ray.

    Points have no step: after a resume, the step and the metrics go back to those of the checkpoint.
    """

    name = "ray"

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Set what is known before the first step."""
        self._gauges = Gauges()
        self._gauges.start(run=run.exp_name)
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
            elif (own := _OF_PAIRS.get(name.removeprefix("eval/"))) is not None:
                self._gauges.set(own, value, split="eval" if name.startswith("eval/") else "train")

    def log_table(self, step: int, table: Table) -> None:
        """Do nothing: Prometheus has no texts."""

    def close(self, status: Status) -> None:  # noqa: ARG002
        """Let Ray's agent drop the metrics; Prometheus has their history."""
        self._gauges.close()


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def record_rank(gauges: Gauges, metrics: Mapping[str, float]) -> None:
    """Set the metrics that differ between ranks."""
    for name, own in _OF_RANK.items():
        if name in metrics:
            gauges.set(own, metrics[name])
    for kind in _MEMORY:
        if (gigabytes := metrics.get(f"memory/peak_{kind}_gb")) is not None:
            gauges.set("peak_memory_bytes", gigabytes * 1e9, kind=kind)
