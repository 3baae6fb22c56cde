"""DPOPipeline: a run from config to final checkpoint, top to bottom, on one page."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from thresher.builders.data import StoreBuilder
from thresher.builders.engines import check_engines
from thresher.builders.inputs import open_inputs
from thresher.builders.objective import build_objective
from thresher.builders.run import (
    build_supervisor,
    build_tracking,
    describe_run,
    find_checkpoint,
    logging_dir,
    loop_settings,
    stop_file,
    track,
)
from thresher.config import DPOConfig
from thresher.data.prepare.prepare import prepare
from thresher.losses.objective import Objective
from thresher.observability.run_log import run_log
from thresher.observability.trackers.console import ConsoleTracker
from thresher.runtime import open_runtime
from thresher.training.loop import fit
from thresher.training.preemption import stop_on_signals
from thresher.training.supervisor import Supervisor

logger = logging.getLogger(__name__)


class DPOPipeline:
    """One run, in this process or on a Ray cluster, as the config says.

    progress takes (what, done, total), build_store prepares pairs that are not yet there, and console is where a person
    watches the training. What happens is logged below the logger `thresher`, and in run.log of the log directory.
    """

    def __init__(
        self,
        config: DPOConfig,
        *,
        console: ConsoleTracker | None = None,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        build_store: StoreBuilder = prepare,
    ):
        self.config = config
        self._console = console
        self._progress = progress
        self._build_store = build_store

    def run(self) -> dict[str, float]:
        """Prepare, train, evaluate, save; return the last evaluation."""
        config = self.config
        # what needs no model and no worker comes first: a mistake is told in seconds
        check_engines(config)
        objective = build_objective(config)
        with run_log(logging_dir(config)):
            stop_file(config).unlink(missing_ok=True)  # of an earlier run; from here on it is for this one
            checkpoint = find_checkpoint(config)
            return build_supervisor(config).run(partial(self._attempt, objective), checkpoint)

    def _attempt(self, objective: Objective, supervisor: Supervisor, checkpoint: Path | None) -> dict[str, float]:
        """Go from a checkpoint to the end, with workers of its own; a part that dies is the supervisor's business."""
        config = self.config
        trackers = build_tracking(config, self._console)

        # devices that are not there are refused before pairs are prepared
        with open_runtime(config, objective) as runtime:
            inputs = open_inputs(config, objective, self._build_store)
            plan = inputs.plan

            run = runtime.start(inputs, checkpoint, self._progress)
            for note in run.notes:
                logger.warning("%s", note)
            mode, layout = run.reference_mode, inputs.layout.name
            logger.info("%s", describe_run(inputs.objective, plan, mode, layout, run.devices, checkpoint))
            run.begin()

            with (
                stop_on_signals(stop_file(config), config.graceful_stop_timeout),
                track(trackers, config, plan, resume_step=supervisor.resume_step) as skipped,
            ):
                log = supervisor.track_progress(trackers)
                return fit(run.trainable, run.progress, plan.num_steps, loop_settings(config), log, skipped)
