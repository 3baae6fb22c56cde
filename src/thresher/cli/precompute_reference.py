"""`thresher precompute-reference`: fills the reference cache before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from thresher.cli.arguments import ConfigFile, Overrides
from thresher.cli.terminal import log_warnings, progress_lines, quiet_libraries

if TYPE_CHECKING:
    from thresher.config import DPOConfig


def precompute_reference(
    path: ConfigFile,
    overrides: Overrides = None,
    all_pairs: Annotated[
        bool, typer.Option("--all-pairs", help="All training pairs, not only the pairs of this run's steps.")
    ] = False,
) -> None:
    """Compute the reference log-probs of a run and cache them for this and later runs."""
    from thresher.builders.preflight import check_run
    from thresher.config import load_config

    config = load_config(path, overrides or [])
    _, warnings = check_run(config, trains=False)
    log_warnings(warnings)
    fill_cache(config, all_pairs=all_pairs)


def fill_cache(config: DPOConfig, *, all_pairs: bool) -> None:
    """Prepare the pairs and score the reference, with progress lines."""
    from thresher.builders.reference import precompute_reference
    from thresher.cli.prepare import build_and_report

    quiet_libraries()
    precompute_reference(config, all_pairs=all_pairs, progress=progress_lines(), build_store=build_and_report)
