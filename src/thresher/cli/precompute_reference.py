"""`thresher precompute-reference`: fill the reference cache ahead of time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def precompute_reference(
    path: Annotated[Path, typer.Argument(help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    all_pairs: Annotated[
        bool, typer.Option("--all-pairs", help="All training pairs, also those that max_steps leaves out.")
    ] = False,
    every_pair: Annotated[bool, typer.Option("--every-pair", hidden=True)] = False,
) -> None:
    """Score a config's pairs with its reference, so that every run over them finds the logps in the cache."""
    from thresher.config import load_config

    config = load_config(path, overrides or [])  # mistakes in it are told before torch is imported

    from thresher.builders.reference import precompute_reference
    from thresher.cli.prepare import build_with_progress, log_report
    from thresher.cli.terminal import progress_lines, quiet_libraries

    quiet_libraries()
    precompute_reference(
        config,
        all_pairs=all_pairs or every_pair,
        progress=progress_lines(),
        build_store=lambda *what: log_report(build_with_progress(*what)),
    )
