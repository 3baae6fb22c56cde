"""Runtimes: execute a run in this process, on the workers of a Ray cluster, or on the processes of torchrun or srun.

Ray is imported only if it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from thresher.runtime.launch import find_launch

if TYPE_CHECKING:  # submitting a job must not import models and trainers
    from thresher.builders.inputs import RunInputs
    from thresher.builders.precompute import ProgressCallback
    from thresher.config import DPOConfig
    from thresher.losses.objective import Objective
    from thresher.observability.timing import PhaseClock
    from thresher.runtime.torchrun import LaunchSession
    from thresher.strategies.strategy import ParameterCounts
    from thresher.training.loop import Trainable, TrainingProgress


class Begin(Protocol):
    """Does the last work before the first step; to_evaluate: also if no step is left."""

    def __call__(self, *, to_evaluate: bool = False) -> None: ...


@dataclass(frozen=True)
class RunHandle:
    """A run that is ready to begin. devices describes the hardware, notes are warnings for the user.

    actor_train and reference are what trains and scores: the workers of the roles on Ray, objects in this process
    otherwise. reference is None if the workers of the policy score it. max_tokens: token budget of a micro-batch, None
    for the default of the layout.
    """

    trainable: Trainable
    progress: TrainingProgress
    reference_mode: str
    layout: str
    devices: str
    parameter_counts: ParameterCounts
    notes: tuple[str, ...]
    begin: Begin
    actor_train: object
    reference: object
    max_tokens: int | None = None


class Runtime(Protocol):
    """Starts the trainers of a run; progress is called with (description, done, total)."""

    def find_damage(self, checkpoint: Path) -> list[str]:
        """Compare the files of a checkpoint with their digests, on the ranks; return what is wrong."""
        ...

    def start(self, inputs: RunInputs, checkpoint: Path | None, progress: ProgressCallback) -> RunHandle: ...


class RunSession(Protocol):
    """Opens a runtime for each attempt of a run, and keeps what outlives a failed attempt."""

    def open_runtime(self) -> AbstractContextManager[Runtime]:
        """Reserve the resources of the run, or raise if they do not exist; leaving the context ends its workers."""
        ...


@dataclass(frozen=True)
class SingleProcessSession:
    """A session of which nothing outlives an attempt."""

    open_runtime: Callable[[], AbstractContextManager[Runtime]]


def launch_session() -> AbstractContextManager[LaunchSession | None]:
    """Connect this process with the others that torchrun or srun started; None if it was not started by them."""
    launch = find_launch(os.environ)
    if launch is None:
        return nullcontext(None)
    from thresher.runtime.torchrun import open_session

    return open_session(launch)


def open_session(config: DPOConfig, objective: Objective, clock: PhaseClock) -> AbstractContextManager[RunSession]:
    """Return the session of a run; clock: measures the parts of a restart."""
    if config.uses_ray:
        from thresher.runtime.ray.environment import set_environment

        set_environment(config.ray_address)
        from thresher.runtime.ray.runtime import RaySession

        return RaySession(config, objective, clock)
    if config.runtime == "torchrun":
        from thresher.runtime.torchrun import open_torchrun_runtime

        return nullcontext(SingleProcessSession(lambda: open_torchrun_runtime(config, objective)))
    from thresher.runtime.local import LocalRuntime

    os.environ.update(config.environment_of("actor_train"))
    return nullcontext(SingleProcessSession(lambda: nullcontext(LocalRuntime(config))))
