"""Trials on Ray Tune: one actor per trial, with limits on concurrency and, if wanted, early stopping by ASHA.

The state of a sweep is in the directories of its runs. Tune's own files are temporary and never read again: a sweep
that is started again reports the logged values of its trials to a new scheduler. For this to give the same decisions,
the scheduler sees the trials in one order: a trial reports a step after all trials before it in the grid have reported
that step, or have ended.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import ray

from thresher.errors import ResourceError, RunStopped
from thresher.runtime.ray.session import ray_session
from thresher.training.preemption import stop_on_signals

_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # a trial without the metric is compared by nothing, which is no reason to end the sweep
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    # a trial that is stopped saves a checkpoint first
    "TUNE_FORCE_TRIAL_CLEANUP_S": "3600",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
_SECONDS_BETWEEN_CHECKS = 0.05


class TrialRecords(Protocol):
    """The records of a trial; `close` stops it if it has not ended."""

    def next_record(self) -> dict[str, float] | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Asha:
    """Early stopping: at grace_steps, and each time the steps have grown by the factor, the best 1/factor continue."""

    grace_steps: int
    reduction_factor: float
    mode: Literal["max", "min"]


@dataclass(frozen=True)
class Turns:
    """The order in which trials report. The driver appends the step that each trial has reported to a file."""

    path: Path
    interrupt_file: Path

    def take(self, index: int, step: float) -> None:
        """Record that the scheduler has seen a step of a trial; infinity if the trial has ended."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([index, step]) + "\n")

    def wait(self, index: int, step: float) -> None:
        """Wait until all earlier trials have reported this step, or until the sweep is interrupted."""
        while not self.interrupt_file.exists():
            reported = dict.fromkeys(range(index), -1.0)
            for line in self.path.read_text(encoding="utf-8").splitlines():
                other, seen = json.loads(line)
                reported[other] = max(seen, reported.get(other, -1.0))
            if all(reported[other] >= step for other in range(index)):
                return
            time.sleep(_SECONDS_BETWEEN_CHECKS)


def run_trials(
    open_trial: Callable[[int], TrialRecords],
    num_trials: int,
    *,
    max_concurrent: int | None,
    gpus_per_trial: int,
    asha: Asha | None,
    interrupt_file: Path,
    stop_seconds: float,
) -> dict[int, str]:
    """Run all trials on a Ray session of this machine; return the errors of trials whose actor died.

    max_concurrent: None is as many as the GPUs allow, and one on CPUs, since a run uses all cores.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with (
        ray_session(None),
        tempfile.TemporaryDirectory(prefix="thresher-sweep-") as files,
        stop_on_signals(interrupt_file, stop_seconds),
    ):
        resources, limit = _resources(max_concurrent, gpus_per_trial)
        turns = Turns(Path(files) / "turns.jsonl", interrupt_file)
        turns.path.touch()
        errors = _fit(open_trial, num_trials, resources, limit, turns, asha, files)
        if interrupt_file.exists():
            raise RunStopped(None, message="the sweep stopped on request; rerun the same command to resume its trials")
    return errors


def _resources(max_concurrent: int | None, gpus_per_trial: int) -> tuple[dict[str, float], int]:
    available = ray.cluster_resources()
    num_gpus = int(available.get("GPU", 0))
    if gpus_per_trial > num_gpus:
        raise ResourceError(
            f"a trial needs {gpus_per_trial} GPUs, but this machine has {num_gpus}; use fewer devices, or set "
            "ray_address to a cluster"
        )
    limit = max_concurrent or (num_gpus // gpus_per_trial if gpus_per_trial else 1)
    cores = math.floor(100 * available["CPU"] / limit) / 100
    return {"cpu": min(cores, 1.0) if gpus_per_trial else cores, "gpu": gpus_per_trial}, limit


def _fit(
    open_trial: Callable[[int], TrialRecords],
    num_trials: int,
    resources: dict[str, float],
    limit: int,
    turns: Turns,
    asha: Asha | None,
    files: str,
) -> dict[int, str]:
    from ray import tune

    actor = tune.with_parameters(_actor_class(), open_trial=open_trial, turns=None if asha is None else turns)
    tuner = tune.Tuner(
        tune.with_resources(actor, resources),
        param_space={"index": tune.grid_search(list(range(num_trials)))},
        tune_config=tune.TuneConfig(
            scheduler=None if asha is None else _scheduler(asha, turns),
            max_concurrent_trials=limit,
            trial_dirname_creator=lambda trial: str(trial.config["index"]),
        ),
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=files,
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the runs have their own
        ),
    )
    results = tuner.fit()
    return {each.config["index"]: str(each.error) for each in results if each.error is not None and each.config}


def _actor_class() -> type:
    from ray import tune

    class TrialActor(tune.Trainable):  # type: ignore[misc]
        """Passes the records of a trial to Tune, and Tune's decision to the trial."""

        def setup(self, config: dict[str, Any], open_trial: Callable[[int], TrialRecords], turns: Turns | None) -> None:
            self._index = config["index"]
            self._trial = open_trial(self._index)
            self._turns = turns
            self._last: dict[str, float] = {}

        def step(self) -> dict[str, Any]:
            record = self._trial.next_record()
            if record is None:
                return {**self._last, "done": True}
            if self._turns is not None:
                self._turns.wait(self._index, record["step"])
            self._last = record
            return dict(record)

        def cleanup(self) -> None:
            self._trial.close()

    return TrialActor


def _scheduler(asha: Asha, turns: Turns) -> Any:
    from ray.tune.schedulers import ASHAScheduler, TrialScheduler

    class OrderedAsha(ASHAScheduler):  # type: ignore[misc]
        """ASHA that records which steps of which trials it has seen."""

        def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
            decision: str = super().on_trial_result(tune_controller, trial, result)
            has_ended = decision == TrialScheduler.STOP
            turns.take(trial.config["index"], math.inf if has_ended else result.get("step", -1))
            return decision

        def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
            super().on_trial_complete(tune_controller, trial, result)
            turns.take(trial.config["index"], math.inf)

        def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
            super().on_trial_error(tune_controller, trial)
            turns.take(trial.config["index"], math.inf)

    return OrderedAsha(
        time_attr="step",
        metric="value",
        mode=asha.mode,
        max_t=2**40,  # runs end by themselves
        grace_period=asha.grace_steps,
        reduction_factor=asha.reduction_factor,
        stop_last_trials=False,
    )
