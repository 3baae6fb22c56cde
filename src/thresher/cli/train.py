"""`thresher train`: trains a policy from a config."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from thresher.cli.arguments import ConfigFile, Overrides
from thresher.cli.terminal import print_lines, progress_lines, show_errors_only
from thresher.observability.details import PHASE

if TYPE_CHECKING:
    from thresher.config import DPOConfig

logger = logging.getLogger(__name__)


def train(path: ConfigFile, overrides: Overrides = None) -> None:
    """Train a policy from a config; prepares the data first if needed, and resumes a stopped run."""
    from thresher.config import load_config
    from thresher.runtime.open import lead

    lead(lambda: load_config(path, overrides or []), _train, show_errors_only)


def _train(config: DPOConfig) -> None:
    """Train in the run's display, and print the path of the last checkpoint."""
    from thresher.builders.preflight import check_files

    warnings = check_files(config)  # before torch is imported

    from thresher.cli.prepare import build_and_report
    from thresher.cli.run_display import run_display, silence_loud_loggers

    log_directory, log_progress = config.log_dir, progress_lines()
    with run_display(log_directory) as console:

        def show_progress(what: str, done: int, total: int) -> None:
            if not console.show_work(what, done, total):
                log_progress(what, done, total)

        logger.info("importing torch and transformers", extra=PHASE)

        from thresher.builders.checkpoints import build_checkpoint_manager
        from thresher.checkpoint.manager import list_checkpoints
        from thresher.pipeline import DPOPipeline

        silence_loud_loggers()
        build_store = partial(build_and_report, show_work=console.show_work)
        DPOPipeline(config, console=console, progress=show_progress, build_store=build_store).train(warnings)
    if not config.export_model:
        logger.info("done; export the model with: thresher export %s --output DIR", config.output_dir)
    # there is none if a checkpoint of a different run completed all steps
    for checkpoint in list_checkpoints(build_checkpoint_manager(config).root)[-1:]:
        print_lines(str(checkpoint))
