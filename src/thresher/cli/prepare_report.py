"""Progress and report of a preparation on the terminal; what is counted is decided in `data/prepare/`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from thresher.cli.terminal import is_live, make_table, print_lines, progress_console, result_console
from thresher.observability.details import DETAIL

if TYPE_CHECKING:
    from rich.console import Console

    from thresher.data.prepare.prepare import PrepareProgress
    from thresher.data.prepare.report import PrepareReport
    from thresher.data.settings import DataSettings

logger = logging.getLogger(__name__)

_LOG_INTERVAL = 10.0  # seconds


@contextmanager
def show_progress(show_work: Callable[[str], bool]) -> Iterator[Callable[[PrepareProgress], object]]:
    """Show a progress bar on a terminal, and log a line every few seconds elsewhere."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    if show_work("preparing"):  # a run's display, which has no room for another bar

        def show_as_work(progress: PrepareProgress) -> None:
            show_work(_describe(progress))

        yield show_as_work
        return
    if not is_live():
        yield _progress_lines()
        return
    columns = (TextColumn("preparing"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Bar(*columns, TimeRemainingColumn(), console=progress_console(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(progress: PrepareProgress) -> None:
            description = f"{progress.rows_read:,} rows, {progress.pairs_kept:,} pairs{_bad_rows(progress)}"
            total = progress.bytes_total or None
            bar.update(task, completed=progress.bytes_read, total=total, description=description)

        yield show


def _progress_lines() -> Callable[[PrepareProgress], object]:
    last = time.monotonic()

    def show(progress: PrepareProgress) -> None:
        nonlocal last
        if time.monotonic() - last >= _LOG_INTERVAL:
            last = time.monotonic()
            logger.info("%s", _describe(progress))

    return show


def _describe(progress: PrepareProgress) -> str:
    done = f" ({progress.bytes_read / progress.bytes_total:.0%})" if progress.bytes_total else ""
    return f"preparing: {progress.rows_read:,} rows read{done}, {progress.pairs_kept:,} pairs kept{_bad_rows(progress)}"


def _bad_rows(progress: PrepareProgress) -> str:
    return f", {progress.bad_rows:,} bad" if progress.bad_rows else ""


def print_report(report: PrepareReport) -> None:
    """Print the report as the result of a command: what happened to every row, token lengths and findings."""
    _print_tables(report, result_console())
    print_lines(*(line for _, line in report.notes()))


def log_report(report: PrepareReport, settings: DataSettings, store: Path, *, in_full: bool) -> None:
    """Show the report as messages; unless in full, tables become lines, and only warnings are shown by default."""
    from thresher.data.prepare.report import percentile_names
    from thresher.data.store.writer import quarantine_file

    if in_full:
        _print_tables(report, progress_console())
    else:
        rows = ", ".join(f"{name} {count:,}" for name, count in report.count_rows())
        logger.info("%s", rows, extra=DETAIL)
        for side, values in report.percentiles.items():
            lengths = zip(percentile_names(), values, strict=True)
            line = ", ".join(f"{name} {value:,}" for name, value in lengths)
            logger.info("tokens of %s: %s", side, line, extra=DETAIL)
    for level, line in report.notes():
        logger.log(level, "%s", line, extra=None if in_full or level > logging.INFO else DETAIL)
    if settings.on_bad_row == "quarantine" and report.bad_rows:
        logger.warning("the bad rows are in %s", quarantine_file(store))


def _print_tables(report: PrepareReport, console: Console) -> None:
    from thresher.data.prepare.report import percentile_names

    counts = [(name, f"{count:,}") for name, count in report.count_rows()]
    console.print(make_table("Rows and examples", [""], ["count"], counts))
    if report.percentiles:
        lengths = [(name, *(f"{value:,}" for value in values)) for name, values in report.percentiles.items()]
        console.print(make_table("Length in tokens", [""], percentile_names(), lengths))
