"""A sweep from its grid to its results: checks, the trials on Ray Tune, and `sweep.json`, which a restart reads."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher import durable
from thresher.builders.checkpoints import changed_settings
from thresher.checkpoint.json_io import encode, load_json
from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.observability.log_files import METRICS
from thresher.optional import require
from thresher.redact import redact, redact_text
from thresher.sweep.grid import Trial, trial_config
from thresher.sweep.results import Mode, Result, TrialEnd, describe_groups, read_end, read_result
from thresher.sweep.trial import TrialRequest
from thresher.training.run_lock import lock_run

logger = logging.getLogger(__name__)

_FILE_NAME, _VERSION = "sweep.json", 1
_INTERRUPT_FILE = "stop"
_DIED = TrialEnd("failed", "its process died; see output.log in its directory, and rerun the same command to try again")


@dataclass(frozen=True)
class SweepSettings:
    """How trials are scheduled and compared."""

    metric: str
    mode: Mode
    asha: bool = False
    grace_steps: int | None = None  # None is the first evaluation
    reduction_factor: float = 4.0
    max_concurrent: int | None = None


class Sweep:
    """The trials of a grid in one directory. Loading checks every config, so mistakes are reported at once."""

    def __init__(self, path: Path, trials: Sequence[Trial], settings: SweepSettings):
        require("a sweep", "ray", extra="ray")
        self.settings = settings
        self._path = path
        self._trials = trials
        self._configs = [trial_config(path, trial) for trial in trials]
        self.run_dirs = [Path(config.output_dir) for config in self._configs]
        directories = {run_dir.parent for run_dir in self.run_dirs}
        if len(directories) > 1:
            raise UserError("output_dir has several values; a sweep has one, with a directory per trial in it")
        (self.directory,) = directories
        if (self.directory / "checkpoints").is_dir():
            raise UserError(f"{self.directory} is the directory of a run; set a different output_dir for the sweep")
        for config in self._configs:
            _check_runtime(config)

    def run(self, prepare: Callable[[], None]) -> list[Result]:
        """Lock the directory, call `prepare` and run the trials that have not ended; return results in grid order."""
        with lock_run(self.directory):
            self._check_same_settings()
            ends = [read_end(run_dir) for run_dir in self.run_dirs]
            due = [index for index, end in enumerate(ends) if end is None or not end.is_final]
            if len(due) < len(ends):
                logger.info("%d of %d trials have ended already", len(ends) - len(due), len(ends))
            self._write()
            if due:
                prepare()
                # ASHA compares with the trials that have ended, which report what they logged
                self._run_trials(range(len(ends)) if self.settings.asha else due)
            results = [
                read_result(trial, read_end(Path(config.output_dir)) or _DIED, config.log_dir)
                for trial, config in zip(self._trials, self._configs, strict=True)
            ]
            self._write(results)
            return results

    def _run_trials(self, indices: Sequence[int]) -> None:
        from thresher.runtime.ray.environment import set_environment

        settings, interrupt_file = self.settings, (self.directory / _INTERRUPT_FILE).resolve()
        interrupt_file.unlink(missing_ok=True)
        # before Ray's variables are set: the ones for the sweep's cluster must not reach the clusters of its trials
        environment = dict(os.environ)
        if (concurrent := settings.max_concurrent or 1) > 1:  # concurrent trials divide the cores
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // concurrent)))
        set_environment(None)
        from thresher.sweep.tune import asha, run_trials

        requests = {
            index: TrialRequest(
                command=self._command(index),
                environment=environment,
                working_dir=Path.cwd(),
                directory=self.run_dirs[index].resolve(),
                log=self._configs[index].log_dir.resolve() / METRICS,
                metric=settings.metric,
                interrupt_file=interrupt_file,
            )
            for index in indices
        }
        grace_steps = settings.grace_steps or max(1, *(config.eval_steps for config in self._configs))
        run_trials(
            requests,
            max_concurrent=settings.max_concurrent,
            gpus_per_trial=max(len(_local_devices(config)) for config in self._configs),
            scheduler=asha(grace_steps, settings.reduction_factor, settings.mode) if settings.asha else None,
            interrupt_file=interrupt_file,
            stop_seconds=max(config.graceful_stop_timeout for config in self._configs),
        )

    def _command(self, index: int) -> list[str]:
        config = self._configs[index]
        own = {"output_dir": config.output_dir, "logging_dir": config.logging_dir, "exp_name": config.exp_name}
        settings = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in own.items()]
        train = [sys.executable, "-m", "thresher", "train", str(self._path)]
        return [*train, *self._trials[index].overrides, *settings]

    def _check_same_settings(self) -> None:
        """Reject a trial that an earlier sweep in this directory ran with different settings."""
        path = self.directory / _FILE_NAME
        if not path.is_file():
            return
        stored = load_json(path)
        known = stored.get("trials") if isinstance(stored, dict) else None
        if not isinstance(known, list) or not all(isinstance(each, dict) and "name" in each for each in known):
            raise UserError(f"{path} is not the state of a sweep; move it away or set a different output_dir")
        earlier = {each["name"]: each.get("config", {}) for each in known}
        for trial, config in zip(self._trials, self._configs, strict=True):
            if trial.name not in earlier:
                continue
            for name, old, new in changed_settings(earlier.pop(trial.name), config):
                raise UserError(
                    f"{self.directory} contains a sweep with different settings ({name} was {old}, is {new}); set a "
                    "different output_dir"
                )
        if earlier:
            names = ", ".join(list(earlier)[:3])
            logger.info("%d trials of an earlier grid stay as they are: %s", len(earlier), names)

    def _write(self, results: Sequence[Result] = ()) -> None:
        """Write the grid, and the results if there are any."""
        settings = self.settings
        content: dict[str, Any] = {
            "version": _VERSION,
            "config_file": str(self._path),
            "metric": settings.metric,
            "mode": settings.mode,
            **({"scheduler": "asha", "reduction_factor": settings.reduction_factor} if settings.asha else {}),
            **({"groups": describe_groups(results)} if results else {}),
            "trials": [
                {
                    "name": trial.name,
                    "overrides": [redact_text(text) for text in trial.overrides],
                    "values": dict(trial.values),
                    **(results[index].to_json() if results else {}),
                    "config": redact(config.model_dump(mode="json")),
                }
                for index, (trial, config) in enumerate(zip(self._trials, self._configs, strict=True))
            ],
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        durable.replace(self.directory / _FILE_NAME, encode(content))


def _check_runtime(config: DPOConfig) -> None:
    if config.runtime == "torchrun":
        raise UserError("a sweep starts its runs itself, not torchrun; set runtime: ray or local")
    devices = _local_devices(config)
    if devices and max(devices) >= len(devices):
        raise UserError(
            f"device_mapping uses device {max(devices)}, but a trial sees its {len(devices)} devices as 0 to "
            f"{len(devices) - 1}; map those, and Ray assigns free GPUs to each trial"
        )
    if config.resume_from_checkpoint not in (None, "auto"):
        raise UserError(
            "resume_from_checkpoint has no effect in a sweep, whose trials resume their own runs; remove it"
        )


def _local_devices(config: DPOConfig) -> set[int]:
    """The GPUs of this machine that a run uses; on a cluster, the run reserves its devices itself."""
    if config.ray_address is not None:
        return set()
    return {*(config.actor_train.device_mapping or ()), *(config.reference.device_mapping or ())}
