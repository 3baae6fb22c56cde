"""`thresher train`: trains a policy from a config."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from thresher.cli.arguments import ConfigFile, Overrides
from thresher.observability.details import PHASE

if TYPE_CHECKING:
    from thresher.config import DPOConfig

logger = logging.getLogger(__name__)


def train(
    path: ConfigFile,
    overrides: Overrides = None,
) -> None:
    """Train a policy from a config; prepares the data first if needed, and resumes a stopped run."""
    from thresher.config import load_config
    from thresher.runtime.open import lead

    lead(lambda: load_config(path, overrides or []), _train, _hide_all_but_errors)


def _hide_all_but_errors() -> None:
    from thresher.cli.terminal import quiet_libraries, show_errors_only

    quiet_libraries()
    show_errors_only()


def _train(config: DPOConfig) -> None:
    """Train in the run's display, and print the path of the last checkpoint."""
    from thresher.builders.preflight import check_files

    warnings = check_files(config)  # before torch is imported

    from thresher.cli.run_display import run_display, silence_loud_loggers
    from thresher.cli.terminal import print_line

    log_directory = Path(config.logging_dir or Path(config.output_dir) / "logs")
    with run_display(log_directory) as display:
        logger.info("importing torch and transformers", extra=PHASE)

        from thresher.builders.checkpoints import build_checkpoint_manager
        from thresher.checkpoint.manager import list_checkpoints
        from thresher.pipeline import DPOPipeline

        silence_loud_loggers()
        DPOPipeline(
            config, console=display.console, progress=display.show_progress, build_store=display.build_store
        ).train(warnings)
    if not config.export_model:
        logger.info("done; export the model with: thresher export %s --output DIR", config.output_dir)
    # there is none if a checkpoint of a different run completed all steps
    for checkpoint in list_checkpoints(build_checkpoint_manager(config).root)[-1:]:
        print_line(str(checkpoint))
