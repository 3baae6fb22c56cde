"""Terminal output: messages and progress on stderr, the results of a command on stdout, so pipes get only results.

Messages are the records of the `thresher` loggers. The results of a command are printed at every level.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thresher.errors import UserError
from thresher.observability.details import is_detail, is_phase
from thresher.redact import RedactingHandler, escape_control_chars, redact_text

logger = logging.getLogger(__name__)

console = Console(stderr=True, highlight=False)
LEVEL_VARIABLE = "THRESHER_LOG_LEVEL"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_SECONDS_BEFORE_PROGRESS, _SECONDS_BETWEEN_PROGRESS = 5.0, 30.0
_is_plain = False
_STYLES = {logging.DEBUG: "dim", logging.WARNING: "bold yellow", logging.ERROR: "bold red"}


def _print_record(record: logging.LogRecord, text: str) -> None:
    """Print INFO as plain lines, other levels with a prefix."""
    style = _STYLES.get(record.levelno)
    prefix = ("", "") if style is None else (f"{record.levelname.lower()}: ", style)
    console.print(Text.assemble(prefix, text), soft_wrap=True)


# not rich's RichHandler, which formats records as a table and so breaks long lines
_handler = RedactingHandler(logging.NOTSET, _print_record)
_handler.addFilter(
    # a run's phase gets its own line where no live display shows it
    lambda record: _handler.level <= logging.DEBUG or not is_detail(record) or (is_phase(record) and not is_live())
)


def choose_level(*, quiet: bool, verbose: bool) -> int:
    """Choose the level from the options, else from the environment."""
    if quiet and verbose:
        raise UserError("--quiet and --verbose exclude each other; pass one of them")
    if quiet or verbose:
        return logging.WARNING if quiet else logging.DEBUG
    name = os.environ.get(LEVEL_VARIABLE) or "info"
    if name.lower() not in LEVELS:
        raise UserError(f"{LEVEL_VARIABLE} is {name!r}; use one of {', '.join(LEVELS)}")
    return LEVELS[name.lower()]


def shown_level() -> int:
    """The level from which messages are shown, for a process that shows its own."""
    return _handler.level


@contextlib.contextmanager
def log_to_terminal(level: int) -> Iterator[None]:
    """Show records at or above a level; run.log always gets records from INFO on."""
    package = logging.getLogger("thresher")
    old_level, propagate = package.level, package.propagate
    _handler.setLevel(level)
    package.setLevel(min(level, logging.INFO))
    package.propagate = False  # a root handler installed by a library would print records again, unmasked
    package.addHandler(_handler)
    try:
        yield
    finally:
        package.removeHandler(_handler)
        package.setLevel(old_level)
        package.propagate = propagate
        _handler.setLevel(logging.NOTSET)


def show_errors_only() -> None:
    """Show errors alone, at every requested level: in a process whose messages another one shows too."""
    quiet_libraries()
    _handler.setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def quiet_libraries() -> None:
    """Turn off the progress bars of transformers for loading and saving."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def use_plain_lines(plain: bool) -> None:
    """Choose whether to print plain lines instead of a live display, even on a terminal."""
    global _is_plain  # one per process, as is the terminal
    _is_plain = plain


def is_live() -> bool:
    """Whether progress is a live display at the bottom of the terminal."""
    from thresher.observability.trackers.console import can_redraw

    return not _is_plain and can_redraw(progress_console())


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Say what a command works on until the block ends: with a spinner, or as a line where there is no live display."""
    if not is_live():
        logger.info("%s", what)
        yield
        return
    with progress_console().status(escape_control_chars(redact_text(what))):
        yield


@contextlib.contextmanager
def following(what: str) -> Iterator[Callable[[str], None]]:
    """Yield what shows the newest line of a program: next to a spinner, or twice a minute as a line."""
    if is_live():
        with progress_console().status(Text(what)) as status:
            # as Text: brackets in a line are not markup
            yield lambda line: status.update(Text(escape_control_chars(redact_text(f"{what}: {line}"))[:150]))
        return
    logger.info("%s", what)
    due = time.monotonic() + _SECONDS_BETWEEN_PROGRESS

    def show(line: str) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _SECONDS_BETWEEN_PROGRESS
            logger.info("%s: %s", what, line)

    yield show


def log_warnings(texts: Iterable[str]) -> None:
    """Show the warnings of a check."""
    for text in texts:
        logger.warning("%s", text)


def print_lines(*lines: str) -> None:
    """Print lines of the result of a command, at every level."""
    for line in lines:
        result_console().print(Text(escape_control_chars(redact_text(line))), soft_wrap=True)


def result_console() -> Console:
    """The console for the results of a command, on stdout."""
    return Console(highlight=False)


def make_table(title: str, texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """Make a table of text columns, then right-aligned ones."""
    table = Table(title=title or None, title_justify="left")
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in rows:  # escaped: the report of a store from elsewhere is untrusted
        table.add_row(*(Text(escape_control_chars(cell)) for cell in row))
    return table


def progress_console() -> Console:
    """The console for progress and tables; a silent one if information is not shown."""
    return console if _handler.level <= logging.INFO else Console(stderr=True, quiet=True)


def progress_lines(clock: Callable[[], float] = time.monotonic) -> Callable[[str, int, int], None]:
    """Log the progress of work that takes longer than a few seconds, then regularly and at its end."""
    current, due, is_shown = "", 0.0, False

    def show(what: str, done: int, total: int) -> None:
        nonlocal current, due, is_shown
        now = clock()
        if what != current:
            current, due, is_shown = what, now + _SECONDS_BEFORE_PROGRESS, False
        if now >= due or (is_shown and done == total):
            due, is_shown = now + _SECONDS_BETWEEN_PROGRESS, True
            logger.info("%s: %d/%d", what, done, total)

    return show
