"""Where a run runs: in this process, or on the workers of a Ray cluster. Ray is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a run that is only submitted must not wait for models and trainers to be imported
    from thresher.builders.inputs import RunInputs
    from thresher.builders.precompute import ProgressCallback
    from thresher.config import DPOConfig
    from thresher.losses.objective import Objective
    from thresher.training.loop import Trainable, TrainingProgress


@dataclass(frozen=True)
class RunHandle:
    """A run that is ready to begin; notes are warnings for the user, place says on what it trains."""

    trainable: Trainable
    progress: TrainingProgress
    reference_mode: str
    devices: str
    notes: tuple[str, ...]
    begin: Callable[[], None]


class Runtime(Protocol):
    """Start the trainers of a run; progress takes (what, done, total)."""

    def start(self, inputs: RunInputs, checkpoint: Path | None, progress: ProgressCallback) -> RunHandle: ...


def open_runtime(config: DPOConfig, objective: Objective) -> AbstractContextManager[Runtime]:
    """Take what the run needs of this machine or cluster, or refuse at once; leaving gives it back."""
    if config.uses_ray:
        from thresher.runtime.ray.environment import set_environment

        set_environment(config.ray_address)
        from thresher.runtime.ray.runtime import open_ray_runtime

        return open_ray_runtime(config, objective)
    from thresher.runtime.local import LocalRuntime

    return nullcontext(LocalRuntime(config))
