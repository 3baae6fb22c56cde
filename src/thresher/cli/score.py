"""`thresher score`: fill the reference cache ahead of time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def score(
    path: Annotated[Path, typer.Argument(help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    every_pair: Annotated[
        bool, typer.Option("--every-pair", help="All training pairs, also those that max_steps leaves out.")
    ] = False,
) -> None:
    """Score a config's pairs with its reference, so that every run over them finds the logps in the cache."""
    from thresher.config import load_config

    config = load_config(path, overrides or [])  # mistakes in it are told before torch is imported

    from thresher.assembly.score import score_ahead
    from thresher.cli.prepare import build_with_progress, print_report
    from thresher.cli.terminal import announce, progress_lines, quiet_libraries

    quiet_libraries()
    score_ahead(
        config,
        every_pair=every_pair,
        announce=announce,
        progress=progress_lines(announce),
        build_store=lambda *what: print_report(build_with_progress(*what)),
    )
