"""What the command line shows beside its results: messages, progress and tables, on stderr so that stdout stays clean.

Messages are the records of the `thresher` loggers. Results that a command exists to print do not depend on the level.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thresher.errors import UserError
from thresher.redact import RedactingFormatter, escape_control_chars, redact_text

logger = logging.getLogger(__name__)

console = Console(stderr=True, highlight=False)
LEVEL_VARIABLE = "THRESHER_LOG_LEVEL"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_STYLES = {logging.DEBUG: "dim", logging.WARNING: "bold yellow", logging.ERROR: "bold red"}


class TerminalHandler(logging.Handler):
    """Print records on the console: level INFO as plain lines, others with their level in front.

    Not rich's RichHandler, which lays records out as a table and so breaks long lines.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = _STYLES.get(record.levelno)
            prefix = ("", "") if style is None else (f"{record.levelname.lower()}: ", style)
            console.print(Text.assemble(prefix, self.format(record)), soft_wrap=True)
        except Exception:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802
        # Python's own would print the arguments of the message unmasked
        with contextlib.suppress(OSError):
            sys.stderr.write(escape_control_chars(redact_text(traceback.format_exc())))


_handler = TerminalHandler()
_handler.setFormatter(RedactingFormatter())


def choose_level(*, quiet: bool, verbose: bool) -> int:
    """The level that the options ask for, else the environment."""
    if quiet and verbose:
        raise UserError("--quiet and --verbose exclude each other; pass one of them")
    if quiet or verbose:
        return logging.WARNING if quiet else logging.DEBUG
    name = os.environ.get(LEVEL_VARIABLE) or "info"
    if name.lower() not in LEVELS:
        raise UserError(f"{LEVEL_VARIABLE} is {name!r}, which is no level; use one of {', '.join(LEVELS)}")
    return LEVELS[name.lower()]


@contextlib.contextmanager
def log_to_terminal(level: int) -> Iterator[None]:
    """Show records from a level on; the log files of runs get those of level INFO all the same."""
    package = logging.getLogger("thresher")
    own_level, propagate = package.level, package.propagate
    _handler.setLevel(level)
    package.setLevel(min(level, logging.INFO))
    package.propagate = False  # handlers that a library gives the root logger would print all again, unmasked
    package.addHandler(_handler)
    try:
        yield
    finally:
        package.removeHandler(_handler)
        package.setLevel(own_level)
        package.propagate = propagate
        _handler.setLevel(logging.NOTSET)


def quiet_libraries() -> None:
    """Turn off the progress bars that transformers draws while it loads and saves; ours say what matters."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def print_line(line: str) -> None:
    """Print a line of a command's result, whatever the level."""
    console.print(Text(escape_control_chars(redact_text(line))), soft_wrap=True)


def progress_console() -> Console:
    """Where progress and tables on the way go: the console, or nowhere where messages are not shown either."""
    return console if _handler.level <= logging.INFO else Console(stderr=True, quiet=True)


def progress_lines(every_seconds: float = 5.0) -> Callable[[str, int, int], None]:
    """Log how far a long piece of work is, now and then and at its end."""
    last = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= every_seconds:
            last = now
            logger.info("%s: %d/%d", what, done, total)

    return show


def metric_table(title: str, metrics: Mapping[str, float]) -> None:
    table = Table("metric", "value", title=title)
    for name, value in metrics.items():
        table.add_row(name, f"{value:.6g}")
    progress_console().print(table)
