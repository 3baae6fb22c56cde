"""A sweep from its grid to its results: checks, the trials on Ray Tune, and the files that a restart reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from thresher.builders.run import logging_dir
from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.sweep.grid import Trial, trial_config
from thresher.sweep.process import TrialRequest, open_trial
from thresher.sweep.results import Mode, Result, group_by_seed, read_result
from thresher.sweep.state import check_same_settings, write_sweep
from thresher.sweep.trial_end import TrialEnd, read_end
from thresher.training.run_lock import lock_run

logger = logging.getLogger(__name__)

_INTERRUPT_FILE = "stop"


@dataclass(frozen=True)
class SweepSettings:
    """How trials are scheduled and compared. asha: stop trials early; grace_steps: None is the first evaluation."""

    metric: str
    mode: Mode
    asha: bool = False
    grace_steps: int | None = None
    reduction_factor: float = 4.0
    max_concurrent: int | None = None


class Sweep:
    """The trials of a grid in one directory. Loading checks every config, so that mistakes are reported at once."""

    def __init__(self, path: Path, trials: Sequence[Trial], settings: SweepSettings):
        self.trials = trials
        self.configs = [trial_config(path, trial) for trial in trials]
        self.settings = settings
        self._path = path
        directories = {Path(config.output_dir).parent for config in self.configs}
        if len(directories) > 1:
            raise UserError("output_dir has several values; a sweep has one, with a directory per trial in it")
        (self.directory,) = directories
        if (self.directory / "checkpoints").is_dir():
            raise UserError(f"{self.directory} is the directory of a run; set another output_dir for the sweep")
        for config in self.configs:
            _check_runtime(config)
            if config.resume_from_checkpoint not in (None, "auto"):
                raise UserError(
                    "resume_from_checkpoint has no effect in a sweep, whose trials resume their own runs; remove it"
                )

    def run(self, prepare: Callable[[], None]) -> list[Result]:
        """Run the trials that have not ended; return the results in the order of the grid.

        prepare: called with the directory locked, before the first trial starts.
        """
        with lock_run(self.directory):
            others = check_same_settings(self.directory, self.trials, self.configs)
            if others:
                logger.info("%d trials of an earlier grid stay as they are: %s", len(others), ", ".join(others[:3]))
            ends = [read_end(Path(config.output_dir)) for config in self.configs]
            if any(end is not None for end in ends):
                logger.info("%d of %d trials have ended already", _count_final(ends), len(ends))
            write_sweep(self.directory, self.trials, self.configs, self._description)
            (self.directory / _INTERRUPT_FILE).unlink(missing_ok=True)
            errors: dict[int, str] = {}
            if self.settings.asha or _count_final(ends) < len(ends):
                prepare()
                errors = self._run_trials()
            results = [self._result(index, errors) for index in range(len(self.trials))]
            description = self._description | {"groups": _describe_groups(results)}
            described = [result.to_json() for result in results]
            write_sweep(self.directory, self.trials, self.configs, description, described)
            return results

    @property
    def run_dirs(self) -> list[Path]:
        return [Path(config.output_dir) for config in self.configs]

    @property
    def _description(self) -> dict[str, Any]:
        settings = self.settings
        scheduler = {"scheduler": "asha", "reduction_factor": settings.reduction_factor} if settings.asha else {}
        return {"config_file": str(self._path), "metric": settings.metric, "mode": settings.mode, **scheduler}

    def _run_trials(self) -> dict[int, str]:
        from thresher.runtime.ray.environment import set_environment

        # before Ray's variables are set: those of the sweep's own cluster must not reach the clusters of trials
        requests = [self._request(index) for index in range(len(self.trials))]
        set_environment(None)
        from thresher.runtime.ray.tune import Asha, run_trials

        settings = self.settings
        asha = Asha(self._grace_steps, settings.reduction_factor, settings.mode) if settings.asha else None
        return run_trials(
            partial(open_trial, requests),
            len(self.trials),
            max_concurrent=settings.max_concurrent,
            gpus_per_trial=max(_num_local_gpus(config) for config in self.configs),
            asha=asha,
            interrupt_file=(self.directory / _INTERRUPT_FILE).resolve(),
            stop_seconds=max(config.graceful_stop_timeout for config in self.configs),
        )

    @property
    def _grace_steps(self) -> int:
        if self.settings.grace_steps is not None:
            return self.settings.grace_steps
        return max(1, *(config.eval_steps for config in self.configs))

    def _request(self, index: int) -> TrialRequest:
        trial, config = self.trials[index], self.configs[index]
        concurrent = self.settings.max_concurrent or 1
        return TrialRequest(
            config=str(self._path.resolve()),
            name=trial.name,
            overrides=trial.overrides,
            directory=Path(config.output_dir).resolve(),
            log_dir=logging_dir(config).resolve(),
            working_dir=Path.cwd(),
            metric=self.settings.metric,
            environment=frozenset(os.environ),
            # concurrent trials divide the cores; a single one uses as many as `thresher train`
            threads=max(1, (os.cpu_count() or 1) // concurrent) if concurrent > 1 else None,
            interrupt_file=(self.directory / _INTERRUPT_FILE).resolve(),
        )

    def _result(self, index: int, errors: dict[int, str]) -> Result:
        trial, config = self.trials[index], self.configs[index]
        end = read_end(Path(config.output_dir))
        if end is None:
            end = TrialEnd("failed", errors.get(index, "it was not run; rerun the same command"))
        return read_result(trial, end, logging_dir(config))


def _count_final(ends: Sequence[TrialEnd | None]) -> int:
    return sum(end is not None and end.is_final for end in ends)


def _check_runtime(config: DPOConfig) -> None:
    if config.runtime == "torchrun":
        raise UserError("a sweep starts its runs itself, not torchrun; set runtime: ray or local")
    devices = _local_devices(config)
    if devices and max(devices) >= len(devices):
        raise UserError(
            f"device_mapping uses device {max(devices)}, but a trial sees its {len(devices)} devices as 0 to "
            f"{len(devices) - 1}; map those, and Ray assigns free GPUs to each trial"
        )


def _local_devices(config: DPOConfig) -> set[int]:
    """The GPUs of this machine that a run uses; on a cluster, the run reserves its devices itself."""
    if config.ray_address is not None:
        return set()
    return {*(config.actor_train.device_mapping or ()), *(config.reference.device_mapping or ())}


def _num_local_gpus(config: DPOConfig) -> int:
    return len(_local_devices(config))


def _describe_groups(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [
        {
            "values": dict(group.values),
            "num_trials": group.num_trials,
            "metrics": {name: {"mean": mean, "half_width": width} for name, (mean, width) in group.metrics.items()},
        }
        for group in group_by_seed(results)
    ]
