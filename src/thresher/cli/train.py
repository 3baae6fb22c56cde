"""`thresher train`: trains a policy from a config."""

from __future__ import annotations

import logging
from pathlib import Path

from thresher.cli.arguments import ConfigFile, Overrides

logger = logging.getLogger(__name__)


def train(
    path: ConfigFile,
    overrides: Overrides = None,
) -> None:
    """Train a policy from a config; prepares the data first if needed, and resumes a stopped run."""
    from thresher.runtime import launch_session

    with launch_session() as session:
        if session is not None and session.launch.rank:
            from thresher.cli.terminal import quiet_libraries, show_errors_only

            quiet_libraries()
            show_errors_only()
            session.follow()
        else:
            _train(path, overrides or [])


def _train(path: Path, overrides: list[str]) -> None:
    from thresher.config import load_config

    config = load_config(path, overrides)

    from thresher.builders.preflight import check_files

    check_files(config)  # also part of the run's checks; here, wrong paths are reported before torch is imported

    from thresher.builders.checkpoints import build_checkpoint_manager
    from thresher.checkpoint.retention import list_checkpoints
    from thresher.cli.prepare import build_and_report
    from thresher.cli.terminal import print_line, progress_console, progress_lines, quiet_libraries
    from thresher.observability.trackers.console import ConsoleTracker
    from thresher.pipeline import DPOPipeline

    quiet_libraries()
    console, log_progress = ConsoleTracker(progress_console()), progress_lines()

    def show_progress(what: str, done: int, total: int) -> None:
        if not console.show_in_bar(what, done, total):
            log_progress(what, done, total)

    DPOPipeline(config, console=console, progress=show_progress, build_store=build_and_report).run()
    logger.info("done; export the model with: thresher export %s --output DIR", config.output_dir)
    # the result; there is none if a checkpoint of another run has completed all steps
    for checkpoint in list_checkpoints(build_checkpoint_manager(config).root)[-1:]:
        print_line(str(checkpoint))
