"""Choose where a run executes. Ray is imported only if it is used, and a process that follows imports no pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from thresher.runtime.launch import find_launch, fit_to_launch

if TYPE_CHECKING:  # submitting a job must not import models and trainers
    from thresher.builders.inputs import RunInputs
    from thresher.config import DPOConfig
    from thresher.observability.timing import PhaseClock
    from thresher.runtime.group import Runtime
    from thresher.runtime.ray.session import RaySession

T = TypeVar("T")


def lead(
    read_config: Callable[[], DPOConfig],
    work: Callable[[DPOConfig], T],
    before_following: Callable[[], object] = lambda: None,
) -> T | None:
    """Do the work in this process, with the config as it fits what started it; under torchrun and srun, on rank 0.

    The other ranks execute the calls of rank 0 until it ends, then return None. before_following: called on them first.
    """
    launch = find_launch(os.environ)
    if launch is None:
        return work(fit_to_launch(read_config(), None))
    from thresher.builders.checkpoints import continue_after_restart
    from thresher.runtime.launch_session import open_session
    from thresher.runtime.torchrun import LaunchedRank

    with open_session(launch) as session:
        if not launch.rank:
            config = fit_to_launch(read_config(), launch)
            return work(continue_after_restart(config) if launch.num_restarts else config)
        before_following()
        session.follow(
            LaunchedRank(launch, session.store), lambda: read_config().model_dump(mode="json", exclude_unset=True)
        )
        return None


def open_connection(config: DPOConfig) -> AbstractContextManager[RaySession | None]:
    """Return what outlives a failed attempt of a run: on Ray, the connection."""
    if not config.uses_ray:
        return nullcontext()
    from thresher.runtime.ray.environment import set_environment

    set_environment(config.ray_address)
    from thresher.runtime.ray.session import RaySession

    return RaySession(config.ray_address)


def open_runtime(
    inputs: RunInputs, clock: PhaseClock, session: RaySession | None = None
) -> AbstractContextManager[Runtime]:
    """Reserve the resources of a run, or raise if they do not exist; leaving the context ends its workers."""
    config = inputs.config
    if config.uses_ray:
        from thresher.runtime.ray.environment import set_environment

        set_environment(config.ray_address)
        from thresher.runtime.ray.runtime import open_ray_runtime

        return open_ray_runtime(config, inputs.mode, clock, session)
    if config.runtime == "torchrun":
        from thresher.runtime.torchrun import open_torchrun_runtime

        return nullcontext(open_torchrun_runtime(config, inputs.mode))
    from thresher.runtime.group import LocalRanks, Runtime

    os.environ.update(config.environment_of("actor_train"))
    return nullcontext(Runtime(config, LocalRanks(config)))
