"""`thresher check`: verifies a config, its files and its models before a run."""

from __future__ import annotations

from thresher.cli.arguments import ConfigFile, Overrides
from thresher.cli.terminal import log_warnings, print_lines


def check(path: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config, its files and its models without starting a run; list all problems."""
    from rich import filesize

    from thresher.builders.preflight import check_run
    from thresher.config import load_config

    config = load_config(path, overrides or [])
    inputs, warnings = check_run(config)
    log_warnings(warnings)

    from thresher.builders.preflight.checks import checkpoint_size  # imports torch

    total, trained = inputs.num_parameters
    print_lines(
        f"policy: {inputs.policy_path}, {total:,} parameters, {trained:,} of them trained",
        f"loss: {inputs.objective.describe()}; reference: {inputs.mode}; layout: {inputs.layout.name}",
        f"checkpoints: about {filesize.decimal(checkpoint_size(inputs))} each, in {config.output_dir}",
        "no problems found; not checked: the rows of the data, and the memory that a step needs",
    )
