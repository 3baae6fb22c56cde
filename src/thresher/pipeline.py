"""DPOPipeline: one run from config to final checkpoint, top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from thresher.builders.checkpoints import find_checkpoint
from thresher.builders.data import StoreBuilder
from thresher.builders.inputs import open_inputs
from thresher.builders.objective import build_objective
from thresher.builders.preflight import check_run
from thresher.builders.run import (
    build_supervisor,
    build_tracking,
    logging_dir,
    loop_settings,
    stop_file,
    summarize_run,
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
from thresher.training.run_lock import lock_run
from thresher.training.supervisor import Supervisor

logger = logging.getLogger(__name__)


class DPOPipeline:
    """A training run, in this process or on a Ray cluster, depending on the config.

    console: shows the training metrics. progress: called with (what, done, total) during long work. build_store:
    tokenizes pairs that are not prepared yet. Messages go to the logger `thresher` and to logs/run.log.
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
        # checks that need no model and no worker come first, so that mistakes are reported within seconds
        checked = check_run(config)
        objective = build_objective(config)
        with lock_run(Path(config.output_dir)), run_log(logging_dir(config)):
            for text in checked.warnings:
                logger.warning("%s", text)
            stop_file(config).unlink(missing_ok=True)  # left by an earlier run
            checkpoint = find_checkpoint(config)
            return build_supervisor(config).run(partial(self._attempt, objective), checkpoint)

    def _attempt(self, objective: Objective, supervisor: Supervisor, checkpoint: Path | None) -> dict[str, float]:
        """Run from a checkpoint to the end on fresh workers; the supervisor handles failures."""
        config = self.config
        trackers = build_tracking(config, self._console)

        # opened first: missing devices are reported before pairs are prepared
        with open_runtime(config, objective) as runtime:
            inputs = open_inputs(config, objective, self._build_store)
            plan = inputs.plan

            run = runtime.start(inputs, checkpoint, self._progress)
            for note in run.notes:
                logger.warning("%s", note)
            summary = summarize_run(
                config, inputs, run.reference_mode, run.layout, run.devices, run.parameter_counts, checkpoint
            )
            for line in summary:
                logger.info("%s", line)
            run.begin()

            with (
                stop_on_signals(stop_file(config), config.graceful_stop_timeout),
                track(trackers, config, plan, resume_step=supervisor.resume_step) as skipped,
            ):
                log = supervisor.track_progress(trackers)
                settings = loop_settings(config)
                return fit(run.trainable, run.progress, plan.num_steps, settings, log, skipped, self._progress)
