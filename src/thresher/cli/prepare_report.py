"""Progress and report of a preparation on the terminal; what is counted is decided in `data/prepare/`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from thresher.data.prepare.prepare import PrepareProgress
    from thresher.data.prepare.report import PrepareReport

logger = logging.getLogger(__name__)

_LOG_INTERVAL = 10.0  # seconds


@contextmanager
def show_progress(
    show_work: Callable[[str], bool] = lambda what: False,
) -> Iterator[Callable[[PrepareProgress], None]]:
    """Show a progress bar on a terminal, and log a line every few seconds elsewhere.

    Args:
        show_work: Shows the progress in a run's display, which has no room for another bar, and returns True.
    """
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from thresher.cli.terminal import is_live, progress_console

    if show_work("preparing"):

        def show_as_work(progress: PrepareProgress) -> None:
            show_work(_describe(progress))

        yield show_as_work
        return
    console = progress_console()
    if not is_live():
        yield _progress_lines()
        return
    columns = (TextColumn("preparing"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Bar(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(progress: PrepareProgress) -> None:
            description = f"{progress.rows_read:,} rows, {progress.pairs_kept:,} pairs{_bad_rows(progress)}"
            total = progress.bytes_total or None
            bar.update(task, completed=progress.bytes_read, total=total, description=description)

        yield show


def _progress_lines() -> Callable[[PrepareProgress], None]:
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
    from thresher.cli.terminal import print_line, result_console

    _print_tables(report, result_console())
    for _, line in report.notes():
        print_line(line)


def log_report(report: PrepareReport, *, in_full: bool = True) -> None:
    """Show the report as messages: its tables if information is shown, and its notes at their level.

    Not in full: tables become lines, and only warnings are shown by default.
    """
    from thresher.cli.terminal import progress_console
    from thresher.observability.details import DETAIL

    if in_full:
        _print_tables(report, progress_console())
    else:
        for line in _table_lines(report):
            logger.info("%s", line, extra=DETAIL)
    for level, line in report.notes():
        logger.log(level, "%s", line, extra=None if in_full or level > logging.INFO else DETAIL)


def _table_lines(report: PrepareReport) -> Iterator[str]:
    from thresher.data.prepare.report import percentile_names

    yield ", ".join(f"{name} {count:,}" for name, count in report.count_rows())
    for side, values in report.percentiles.items():
        lengths = zip(percentile_names(), values, strict=True)
        yield f"tokens of {side}: " + ", ".join(f"{name} {value:,}" for name, value in lengths)


def _print_tables(report: PrepareReport, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from thresher.data.prepare.report import percentile_names
    from thresher.redact import escape_control_chars

    table = Table("", "count", title="Rows and pairs", title_justify="left")
    table.columns[1].justify = "right"
    for name, count in report.count_rows():
        # escaped: the report of a store from elsewhere is untrusted
        table.add_row(Text(escape_control_chars(name)), f"{count:,}")
    console.print(table)
    if report.percentiles:
        lengths = Table("", *percentile_names(), title="Length in tokens", title_justify="left")
        for column in lengths.columns[1:]:
            column.justify = "right"
        for name, values in report.percentiles.items():
            lengths.add_row(Text(escape_control_chars(name)), *(f"{value:,}" for value in values))
        console.print(lengths)


def summarize_changes(report: PrepareReport) -> str:
    """Count the rows that were changed or dropped, as the end of a line."""
    _, _, *changes = report.count_rows()
    return "; " + ", ".join(f"{name} {count:,}" for name, count in changes) if changes else ""
