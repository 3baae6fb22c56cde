"""`thresher train`: run a config."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

logger = logging.getLogger(__name__)


def train(
    path: Annotated[Path, typer.Argument(help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
) -> None:
    """Train a policy as a config says; data is prepared on the way where needed."""
    from thresher.config import load_config

    config = load_config(path, overrides or [])  # mistakes in it are told before torch is imported

    from thresher.cli.prepare import build_with_progress, log_report
    from thresher.cli.terminal import metric_table, progress_console, progress_lines, quiet_libraries
    from thresher.observability.trackers.console import ConsoleTracker
    from thresher.pipeline import DPOPipeline

    quiet_libraries()
    pipeline = DPOPipeline(
        config,
        console=ConsoleTracker(progress_console()),
        progress=progress_lines(),
        build_store=lambda *what: log_report(build_with_progress(*what)),
    )
    metrics = pipeline.run()
    if metrics:
        metric_table("last evaluation", metrics)
    logger.info("done; export the model with: thresher export %s --output DIR", config.output_dir)
