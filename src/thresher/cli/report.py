"""`thresher report`: the logs of runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thresher.cli.terminal import print_lines
from thresher.errors import UserError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="output_dir of each run, or its logging_dir.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write, .html.")] = Path(
        "report.html"
    ),
) -> None:
    """Write a report on one run, or a comparison of several, as one HTML file that works offline."""
    from thresher.report.page import write_report

    if output.suffix not in (".html", ".htm"):
        raise UserError(f"--output {output} does not end in .html; a report is an HTML file")
    write_report(runs, output)
    print_lines(str(output))
