"""`thresher check`: verifies a config, its files and its models before a run."""

from __future__ import annotations

import logging

from thresher.cli.arguments import ConfigFile, Overrides

logger = logging.getLogger(__name__)


def check(path: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config, its files and its models without starting a run; list all problems."""
    from rich import filesize

    from thresher.builders.preflight import check_run
    from thresher.cli.terminal import print_line
    from thresher.config import load_config

    config = load_config(path, overrides or [])
    inputs, warnings = check_run(config)
    for text in warnings:
        logger.warning("%s", text)

    from thresher.builders.preflight.checks import checkpoint_size  # imports torch

    counts = inputs.parameters
    print_line(f"policy: {inputs.policy_path}, {counts.total:,} parameters, {counts.trained:,} of them trained")
    print_line(f"loss: {inputs.objective.describe()}; reference: {inputs.mode}; layout: {inputs.layout.name}")
    print_line(f"checkpoints: about {filesize.decimal(checkpoint_size(inputs))} each, in {config.output_dir}")
    print_line("no problems found; not checked: the rows of the data, and the memory that a step needs")
