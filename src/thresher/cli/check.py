"""`thresher check`: verifies a config, its files and its models before a run."""

from __future__ import annotations

from thresher.cli.arguments import ConfigFile, Overrides
from thresher.cli.terminal import log_warnings, print_lines


def check(path: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config, its files and its models without starting a run; list all problems."""
    from thresher.builders.preflight import check_run
    from thresher.config import load_config

    result = check_run(load_config(path, overrides or []))
    log_warnings(result.warnings)
    print_lines(
        *result.summary, "no problems found; not checked: the rows of the data, and the memory that a step needs"
    )
