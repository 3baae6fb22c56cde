"""DPOPipeline: one run from config to final checkpoint, top to bottom."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thresher import durable
from thresher.builders.checkpoints import find_checkpoint
from thresher.builders.data import StoreBuilder
from thresher.builders.export import export_run
from thresher.builders.inputs import RunInputs
from thresher.builders.preflight import check_files, check_inputs
from thresher.builders.run import (
    build_callbacks,
    build_supervisor,
    build_tracking,
    check_not_stopped,
    describe_run,
    describe_unfinished_stop,
    run_facts,
    summarize_run,
    track,
    watch_health,
)
from thresher.builders.samples import build_judge
from thresher.checkpoint.manager import DamagedCheckpoints
from thresher.checkpoint.manifest import failed_verification
from thresher.config import DPOConfig
from thresher.data.prepare.prepare import prepare
from thresher.errors import UserError
from thresher.observability.details import DETAIL, PHASE
from thresher.observability.log_files import EVAL_EXTERNAL, EVAL_PAIRS
from thresher.observability.run_log import run_log
from thresher.observability.timing import PhaseClock
from thresher.observability.trackers.callbacks import CallbackTracker
from thresher.observability.trackers.console import ConsoleTracker
from thresher.observability.trackers.jsonl import StepLog
from thresher.runtime.group import Runtime
from thresher.runtime.launch import find_launch, fit_to_launch
from thresher.runtime.open import lead, open_connection, open_runtime
from thresher.sampling.judges import SampleLog, judge_answers
from thresher.training.loop import evaluate, fit
from thresher.training.preemption import stop_on_signals
from thresher.training.run_lock import lock_run
from thresher.training.supervisor import Supervisor

if TYPE_CHECKING:
    from thresher.runtime.ray.session import RaySession

logger = logging.getLogger(__name__)


class DPOPipeline:
    """A training run, in this process, on a Ray cluster or on the processes of torchrun, depending on the config.

    Messages go to the logger `thresher` and to logs/run.log.
    """

    def __init__(
        self,
        config: DPOConfig | None = None,
        *,
        pipeline_config: DPOConfig | None = None,
        console: ConsoleTracker | None = None,
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        build_store: StoreBuilder = prepare,
        callbacks: Sequence[object] = (),
    ):
        """Load no models.

        Args:
            config: the run.
            pipeline_config: another name of `config`, as in ROLL.
            console: shows the training metrics.
            progress: called with (what, done, total) during long work.
            build_store: tokenizes pairs that are not prepared yet.
            callbacks: objects with methods of transformers' TrainerCallback.
        """
        given = [each for each in (config, pipeline_config) if each is not None]
        if len(given) != 1:
            raise UserError("DPOPipeline takes one config, as `config` or `pipeline_config`")
        self.config = given[0]
        self._console = console
        self._progress = progress
        self._build_store = build_store
        self._callbacks = callbacks
        self._run: Runtime | None = None
        self._damaged = DamagedCheckpoints()
        self._summary: set[str] = set()

    @property
    def actor_train(self) -> Any:
        """The policy, in `with pipeline.open():`: a `RankTrainer` in this process, or the `Cluster` of its workers."""
        return self._opened.actor_train

    @property
    def reference(self) -> Any:
        """The reference: a `Reference` in this process, the `Cluster` of its workers, or None without workers."""
        return self._opened.reference

    def run(self) -> dict[str, float]:
        """Prepare, train, evaluate, save; return the last evaluation. Ranks that follow rank 0 return none."""
        return self._lead(lambda: self.train(check_files(self.config)))

    def evaluate(self) -> dict[str, float]:
        """Evaluate the newest checkpoint, or the initial policy if there is none, on the validation pairs."""
        return self._lead(self._evaluate)

    @contextmanager
    def open(self) -> Iterator[Runtime]:
        """Load the models of the newest checkpoint without training, for use by hand until the block ends."""
        self.config = fit_to_launch(self.config, find_launch(os.environ))
        if self.config.runtime == "torchrun":
            raise UserError("a pipeline cannot be opened under torchrun or srun; use one process or Ray")
        with self._open() as run:
            yield run

    def train(self, file_warnings: Sequence[str]) -> dict[str, float]:
        """Do what `run` does in a process that leads; `check_files` has accepted the config, with these warnings."""
        callbacks, clock = build_callbacks(self.config, self._callbacks), PhaseClock()
        with self._reserve_directory(file_warnings) as inputs:
            supervisor = build_supervisor(self.config, self._damaged, clock)
            with open_connection(self.config) as session:
                attempt = partial(self._attempt, inputs, callbacks, session)
                evaluation = supervisor.run(attempt, self._find_checkpoint(), self._find_checkpoint)
            if self.config.export_model:  # after the runtime, whose workers hold memory
                logger.info("exporting the model", extra=PHASE)
                export_run(self.config)
            return evaluation

    def _lead(self, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Do the work in this process, or follow rank 0 until it has done it."""

        def work_on(config: DPOConfig) -> dict[str, float]:
            self.config = config
            return work()

        return lead(lambda: self.config, work_on) or {}

    def _evaluate(self) -> dict[str, float]:
        judge = build_judge(self.config)
        with self._open() as run:
            return evaluate(
                run,
                run.step,
                self._progress,
                keep_answers=lambda step, answers: judge_answers(judge, answers, step)[0],
            )

    @contextmanager
    def _open(self) -> Iterator[Runtime]:
        find = self._find_checkpoint
        with (
            self._reserve_directory(check_files(self.config)) as inputs,
            open_connection(self.config) as session,
            self._start(inputs, PhaseClock(), session, find(), find) as run,
        ):
            run.begin(to_evaluate=True)
            yield run
            run.wait_for_saves()  # the workers end with the runtime

    @contextmanager
    def _reserve_directory(self, file_warnings: Sequence[str]) -> Iterator[RunInputs]:
        """Check the run, then lock its directory and open its log."""
        config = self.config
        # checks that need no model and no worker come first, so that mistakes are reported within seconds
        logger.info("checking the config, its files and its models", extra=PHASE)
        inputs = RunInputs(config, self._build_store)
        warnings = [*file_warnings, *check_inputs(inputs)]
        with lock_run(Path(config.output_dir)), run_log(config.log_dir):
            for text in warnings:
                logger.warning("%s", text)
            with durable.translate_os_errors("could not remove the stop file of an earlier run"):
                config.stop_file.unlink(missing_ok=True)  # left by an earlier run
            yield inputs

    def _find_checkpoint(self) -> Path | None:
        return find_checkpoint(self.config, self._damaged)

    @contextmanager
    def _start(
        self,
        inputs: RunInputs,
        clock: PhaseClock,
        session: RaySession | None,
        checkpoint: Path | None,
        find_other: Callable[[], Path | None],
    ) -> Iterator[Runtime]:
        """Let the ranks verify the checkpoint, or others until one is intact, and load the models."""
        # the runtime is opened first: missing devices are reported before pairs are prepared
        if self.config.uses_ray:
            logger.info("connecting to Ray", extra=PHASE)
        with open_runtime(inputs, clock, session) as runtime:
            logger.info("opening the data", extra=PHASE)
            inputs.open()
            while checkpoint is not None:
                logger.info("verifying %s", checkpoint.name, extra=PHASE)
                if not (problems := runtime.find_damage(checkpoint)):
                    break
                error = failed_verification(checkpoint, problems)
                self._damaged.add(checkpoint, error)
                checkpoint = find_other()
                logger.warning("skipped an invalid checkpoint: %s", error)
            logger.info("loading the models", extra=PHASE)
            runtime.start(inputs, checkpoint, self._progress)
            self._run = runtime
            try:
                yield runtime
            finally:
                self._run = None

    def _attempt(
        self,
        inputs: RunInputs,
        callbacks: CallbackTracker | None,
        session: RaySession | None,
        supervisor: Supervisor,
        checkpoint: Path | None,
    ) -> dict[str, float]:
        """Run from a checkpoint to the end; the supervisor handles failures."""
        config = self.config
        check_not_stopped(config, checkpoint)

        def fall_back() -> Path | None:
            found = supervisor.fall_back()
            check_not_stopped(config, found)
            return found

        trackers, judge = build_tracking(config, self._console, callbacks), build_judge(config)
        log_dir = config.log_dir

        with self._start(inputs, supervisor.clock, session, checkpoint, fall_back) as run:
            facts = run_facts(run.inputs, run.devices)
            for line in summarize_run(facts, run.inputs.plan, run.checkpoint):
                logger.info("%s", line, extra=DETAIL if line in self._summary else None)  # shown by an earlier attempt
                self._summary.add(line)
            logger.info("preparing the first step", extra=PHASE)
            run.begin()
            supervisor.clock.end("preparation")

            resume_step = supervisor.resume_step
            with (
                stop_on_signals(config.stop_file, config.graceful_stop_timeout, self._report_unfinished_stop),
                track(trackers, run.inputs, resume_step=resume_step) as skipped,
                watch_health(run.inputs, trackers, run.checkpoint, resume_step=resume_step) as watched,
            ):
                describe_run(run.inputs, facts)
                pairs_log = StepLog(log_dir / EVAL_PAIRS, resume_step)
                StepLog(log_dir / EVAL_EXTERNAL, resume_step)  # drops results of an earlier run, or of later steps
                return fit(
                    run,
                    config,
                    run.inputs.plan,
                    supervisor.track_progress(watched),
                    skipped,
                    show_progress=self._progress,
                    keep_examples=lambda step, pairs: pairs_log.write(pairs.to_json(step)),
                    keep_answers=SampleLog(log_dir, resume_step, judge, trackers.log_table).write,
                )

    def _report_unfinished_stop(self) -> None:
        if self._console is not None:
            self._console.erase()
        logger.error("%s", describe_unfinished_stop(self.config))

    @property
    def _opened(self) -> Runtime:
        if self._run is None:
            raise UserError(
                "the constructor loads no models; use pipeline.actor_train and pipeline.reference inside `with "
                "pipeline.open():`, or train with pipeline.run()"
            )
        return self._run
