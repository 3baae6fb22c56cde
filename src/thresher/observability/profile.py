"""Profiles of chosen steps: each rank writes a trace, and on a GPU a snapshot of its allocations."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from thresher.errors import UserError
from thresher.observability.heartbeat import set_activity

logger = logging.getLogger(__name__)

DIRECTORY = "profile"
_MAX_ALLOCATIONS = 1_000_000  # of a snapshot, the newest


class StepProfiler:
    """Profiles steps, counted from 1, into `profile/` in a log directory; other steps run as they are."""

    def __init__(self, steps: Collection[int], num_steps: int, log_dir: Path, rank: int, device: torch.device):
        if steps and max(steps) > num_steps:
            raise UserError(f"profile.steps has step {max(steps)}, and the run has {num_steps}; name earlier steps")
        self._steps, self._device = frozenset(steps), device
        self._directory, self._rank = log_dir / DIRECTORY, rank

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile what runs within a `with` block, if the step is a chosen one; write nothing if it raises."""
        if step not in self._steps:
            yield
            return
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        try:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
            recorded = profile(activities=activities, record_shapes=True, profile_memory=True)
            with recorded, record_function(f"step {step}"):
                yield
            set_activity(f"writing the profile of step {step}")
            self._write(step, recorded, on_gpu=on_gpu)
        finally:
            if on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, step: int, recorded: profile, *, on_gpu: bool) -> None:
        path = self._directory / f"rank-{self._rank}-step-{step}.trace.json.gz"
        unfinished = path.with_name(f".{path.name}")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
            if on_gpu:
                torch.cuda.memory._dump_snapshot(str(unfinished))
                unfinished.replace(self._directory / f"rank-{self._rank}-step-{step}.memory.pickle")
        except OSError as error:  # training does not depend on it
            logger.warning("could not write %s: %s", path, error.strerror or error)
        else:
            logger.info("profile of step %d: %s", step, path)
