"""Write a report to a file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from thresher import durable
from thresher.errors import unusable_path
from thresher.report.numbers import format_size
from thresher.report.page import render_page
from thresher.report.run_files import read_runs

logger = logging.getLogger(__name__)

MAX_BYTES = 5_000_000


def write_report(directories: Sequence[Path], output: Path) -> None:
    """Read the runs and write the report in one piece: an existing file is replaced, or stays as it was."""
    runs = read_runs(directories)
    content = render_page(runs, datetime.now()).encode("utf-8", errors="replace")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(output, content)
    except OSError as error:
        raise unusable_path(str(output), error.strerror) from None
    if len(content) > MAX_BYTES:
        logger.warning("%s is larger than %s; report fewer runs at once", output, format_size(MAX_BYTES))
    logger.info("report on %d run%s, %s", len(runs), "" if len(runs) == 1 else "s", format_size(len(content)))
