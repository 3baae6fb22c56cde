"""`thresher train`: run a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    path: Annotated[Path, typer.Argument(help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
) -> None:
    """Train a policy as a config says; data is prepared on the way where needed."""
    from thresher.config import load_config

    config = load_config(path, overrides or [])  # mistakes in it are told before torch is imported

    from thresher.cli.prepare import build_with_progress, print_report
    from thresher.cli.terminal import metric_table, progress_lines, quiet_libraries
    from thresher.observe.console import ConsoleTracker
    from thresher.pipeline import DPOPipeline

    quiet_libraries()
    console = ConsoleTracker()
    pipeline = DPOPipeline(
        config,
        console=console,
        announce=console.print,
        progress=progress_lines(console.print),
        build_store=lambda *what: print_report(build_with_progress(*what)),
    )
    metrics = pipeline.run()
    if metrics:
        metric_table("last evaluation", metrics)
    console.print(f"done; export the model with: thresher export {config.output_dir} --output DIR")
