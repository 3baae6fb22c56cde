"""Runtimes: execute a run in this process or on the workers of a Ray cluster. Ray is imported only if it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # submitting a job must not import models and trainers
    from thresher.builders.inputs import RunInputs
    from thresher.builders.precompute import ProgressCallback
    from thresher.config import DPOConfig
    from thresher.losses.objective import Objective
    from thresher.strategies.native.parameters import ParameterCounts
    from thresher.training.loop import Trainable, TrainingProgress


@dataclass(frozen=True)
class RunHandle:
    """A run that is ready to begin. devices describes the hardware, notes are warnings for the user."""

    trainable: Trainable
    progress: TrainingProgress
    reference_mode: str
    layout: str
    devices: str
    parameter_counts: ParameterCounts
    notes: tuple[str, ...]
    begin: Callable[[], None]


class Runtime(Protocol):
    """Starts the trainers of a run; progress is called with (description, done, total)."""

    def start(self, inputs: RunInputs, checkpoint: Path | None, progress: ProgressCallback) -> RunHandle: ...


def open_runtime(config: DPOConfig, objective: Objective) -> AbstractContextManager[Runtime]:
    """Reserve the resources of the run, or raise if they do not exist; leaving the context releases them."""
    if config.uses_ray:
        from thresher.runtime.ray.environment import set_environment

        set_environment(config.ray_address)
        from thresher.runtime.ray.runtime import open_ray_runtime

        return open_ray_runtime(config, objective)
    from thresher.runtime.local import LocalRuntime

    os.environ.update(config.environment_of("actor_train"))
    return nullcontext(LocalRuntime(config))
