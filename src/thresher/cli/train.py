"""`thresher train`: trains a policy from a config."""

from __future__ import annotations

import logging

from thresher.cli.arguments import ConfigFile, Overrides

logger = logging.getLogger(__name__)


def train(
    path: ConfigFile,
    overrides: Overrides = None,
) -> None:
    """Train a policy from a config; prepares the data first if needed, and resumes a stopped run."""
    from thresher.config import load_config

    config = load_config(path, overrides or [])

    from thresher.builders.preflight import check_files

    check_files(config)  # also part of the run's checks; here, wrong paths are reported before torch is imported

    from thresher.cli.prepare import build_and_report
    from thresher.cli.terminal import metric_table, progress_console, progress_lines, quiet_libraries
    from thresher.observability.trackers.console import ConsoleTracker
    from thresher.pipeline import DPOPipeline

    quiet_libraries()
    pipeline = DPOPipeline(
        config,
        console=ConsoleTracker(progress_console()),
        progress=progress_lines(),
        build_store=build_and_report,
    )
    metrics = pipeline.run()
    if metrics:
        metric_table("last evaluation", metrics)
    logger.info("done; export the model with: thresher export %s --output DIR", config.output_dir)
