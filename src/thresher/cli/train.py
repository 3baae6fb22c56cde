"""`thresher train`: trains a policy from a config."""

from __future__ import annotations

import logging
import os
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
    from thresher.runtime import launch_session

    with launch_session() as session:
        if session is not None and session.launch.rank:
            from thresher.cli.terminal import quiet_libraries, show_errors_only

            quiet_libraries()
            show_errors_only()
            session.follow(lambda: _load(path, overrides).model_dump(mode="json", exclude_unset=True))
        else:
            _train(_load(path, overrides))


def _load(path: Path, overrides: list[str] | None) -> DPOConfig:
    from thresher.config import load_config

    return load_config(path, overrides or [])


def _train(config: DPOConfig) -> None:
    from thresher.cli.terminal import print_line

    for checkpoint in run(config)[-1:]:  # the result; there is none if a checkpoint of another run completed all steps
        print_line(str(checkpoint))


def run(config: DPOConfig) -> list[Path]:
    """Run a config in the display of a run; return its checkpoints."""
    from thresher.builders.preflight import check_files
    from thresher.runtime.launch import find_launch, fit_to_launch

    config = fit_to_launch(config, find_launch(os.environ))
    check_files(config)  # also part of the run's checks; here, wrong paths are reported before torch is imported

    from thresher.cli.run_display import run_display

    log_directory = Path(config.logging_dir or Path(config.output_dir) / "logs")
    with run_display(log_directory) as display:
        logger.info("importing torch and transformers", extra=PHASE)

        from thresher.builders.checkpoints import build_checkpoint_manager
        from thresher.checkpoint.manager import list_checkpoints
        from thresher.cli.library_messages import silence_loud_loggers
        from thresher.pipeline import DPOPipeline

        silence_loud_loggers()
        DPOPipeline(
            config, console=display.console, progress=display.show_progress, build_store=display.build_store
        ).run()
    if not config.export_model:
        logger.info("done; export the model with: thresher export %s --output DIR", config.output_dir)
    return list_checkpoints(build_checkpoint_manager(config).root)
