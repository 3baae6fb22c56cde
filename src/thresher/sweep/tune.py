"""Trials on Ray Tune: an actor per trial, a limit on how many run at a time, and ASHA if wanted.

Tune's files are temporary, because a sweep that is started again reads its run directories, which contain no pickles.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from thresher.errors import ResourceError, RunStopped
from thresher.runtime.ray.session import ray_session
from thresher.sweep.trial import TrialProcess, TrialRequest
from thresher.training.preemption import stop_on_signals
from thresher.training.run_lock import wait_until_unlocked


class TrialActor(tune.Trainable):  # type: ignore[misc]
    """Passes a trial's logged metric to Tune, and Tune's decision to stop to the trial."""

    def setup(self, config: dict[str, Any], requests: Mapping[int, TrialRequest]) -> None:
        self._trial = TrialProcess(requests[config["index"]])

    def step(self) -> dict[str, Any]:
        return self._trial.next_result()

    def cleanup(self) -> None:
        self._trial.stop()


class _Interrupt(tune.Stopper):  # type: ignore[misc]
    """Ends the sweep when its interrupt file exists and the running trials have saved their last step."""

    def __init__(self, file: Path, run_dirs: Sequence[Path], seconds: float) -> None:
        self._file = file
        self._run_dirs = run_dirs
        self._seconds = seconds

    def __call__(self, _trial_id: str, _result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        if not self._file.exists():
            return False
        for run_dir in self._run_dirs:
            wait_until_unlocked(run_dir, self._seconds)
        return True


def run_trials(
    requests: Mapping[int, TrialRequest],
    *,
    max_concurrent: int | None,  # None: as many as the GPUs allow, and one on CPUs, where a run uses all cores
    gpus_per_trial: int,
    scheduler: ASHAScheduler | None,
    interrupt_file: Path,
    stop_seconds: float,  # to save the running trials after a signal
) -> None:
    """Run the trials on a Ray session of this machine, until all have ended or a signal created the interrupt file."""
    with (
        stop_on_signals(interrupt_file, stop_seconds),
        ray_session(None),
        tempfile.TemporaryDirectory(prefix="thresher-sweep-") as files,
        ThreadPoolExecutor(1) as thread,  # in the main thread, Tune would install its own signal handler
        contextlib.redirect_stdout(io.StringIO()),  # Tune prints where its temporary files are, even if not verbose
    ):
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus_per_trial > num_gpus:
            raise ResourceError(
                f"a trial needs {gpus_per_trial} GPUs, but this machine has {num_gpus}; use fewer devices, or set "
                "ray_address to a cluster"
            )
        actor = tune.with_parameters(TrialActor, requests=requests)
        stopper = _Interrupt(interrupt_file, [each.directory for each in requests.values()], stop_seconds)
        tuner = tune.Tuner(
            # next to no CPU: max_concurrent_trials is the limit, and Tune rejects a request for nothing
            tune.with_resources(actor, {"cpu": 0.01, "gpu": gpus_per_trial}),
            param_space={"index": tune.grid_search(list(requests))},
            tune_config=tune.TuneConfig(
                scheduler=scheduler,
                max_concurrent_trials=max_concurrent or (num_gpus // gpus_per_trial if gpus_per_trial else 1),
            ),
            run_config=tune.RunConfig(
                storage_path=files,
                verbose=0,
                stop=stopper,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the runs have their own
            ),
        )
        thread.submit(tuner.fit).result()
        if interrupt_file.exists():
            raise RunStopped(None, message="the sweep stopped on request; rerun the same command to resume its trials")


def asha(grace_steps: int, reduction_factor: float, mode: str) -> ASHAScheduler:
    """Return the scheduler that keeps the best 1/reduction_factor of the trials at each rung."""
    return ASHAScheduler(
        time_attr="step",
        metric="value",
        mode=mode,
        max_t=2**40,  # runs end by themselves
        grace_period=grace_steps,
        reduction_factor=reduction_factor,
        stop_last_trials=False,
    )
