"""A run's log files: `run.log` next to the metrics, and one file per worker in `workers/`.

Both hold the records of the `thresher` loggers as plain text, masked, and are appended to by restarts and resumed runs.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from thresher.errors import RunStopped, UserError
from thresher.observability.trackers.tracker import refuse_links
from thresher.redact import RedactingFormatter

logger = logging.getLogger(__name__)

FILE_NAME = "run.log"
WORKERS = "workers"
_PACKAGE = logging.getLogger("thresher")


class LogFile(logging.StreamHandler[TextIO]):
    """Append records to a file and flush each. After a failed write, log a warning and stop writing to the file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_NOFOLLOW: a run directory from another source may contain a symlink that points out of it
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        super().__init__(os.fdopen(file, "a", encoding="utf-8", errors="backslashreplace"))
        self.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._path = path

    def format(self, record: logging.LogRecord) -> str:
        # indent continuation lines, so none of them looks like a record
        return super().format(record).replace("\n", "\n    ")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802
        _PACKAGE.removeHandler(self)
        logger.warning("could not write %s: %r; no more records are written to it", self._path, sys.exc_info()[1])

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):  # handleError has reported a failed write
            self.stream.close()


@contextlib.contextmanager
def run_log(directory: Path) -> Iterator[None]:
    """Write `run.log` during a run, at level INFO and above, including the error that ends the run early."""
    if directory.is_dir():
        refuse_links(directory)
    file = _open(directory / FILE_NAME)
    if file is None:
        yield
        return
    with _info_enabled():
        _PACKAGE.addHandler(file)
        try:
            yield
        except BaseException as error:
            file.handle(_last_record(error))
            raise
        finally:
            _PACKAGE.removeHandler(file)
            file.close()


def _open(path: Path) -> LogFile | None:
    try:
        return LogFile(path)
    except OSError as error:
        logger.warning("could not open %s: %s; the run continues without this file", path, error.strerror or error)
        return None


def worker_log(directory: Path, role: str, rank: int) -> Path:
    return directory / WORKERS / f"{role}-{rank}.log"


def open_worker_log(directory: Path, role: str, rank: int, level: int) -> LogFile:
    """Write the records of this worker process to its log file; raise OSError if the file cannot be opened."""
    path = worker_log(directory, role, rank)
    if path.parent.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path.parent))
    file = LogFile(path)
    faulthandler.enable(file.stream)  # a crash leaves its stack here; Ray does not report it
    _PACKAGE.addHandler(file)
    _PACKAGE.setLevel(level)
    _PACKAGE.propagate = False  # Ray's handlers would write the records unmasked
    return file


@contextlib.contextmanager
def _info_enabled() -> Iterator[None]:
    """Lower the level to INFO for handlers added inside the block; existing handlers keep their level."""
    level, previous_level, propagate = _PACKAGE.getEffectiveLevel(), _PACKAGE.level, _PACKAGE.propagate
    if level <= logging.INFO:
        yield
        return
    forward = _Forward(level, _PACKAGE.handlers[:], _PACKAGE.parent if propagate else None)
    for handler in forward.handlers:
        _PACKAGE.removeHandler(handler)
    _PACKAGE.addHandler(forward)
    _PACKAGE.propagate = False
    _PACKAGE.setLevel(logging.INFO)
    try:
        yield
    finally:
        _PACKAGE.setLevel(previous_level)
        _PACKAGE.propagate = propagate
        _PACKAGE.removeHandler(forward)
        for handler in forward.handlers:
            _PACKAGE.addHandler(handler)


class _Forward(logging.Handler):
    def __init__(self, level: int, handlers: list[logging.Handler], parent: logging.Logger | None) -> None:
        super().__init__(level)
        self.handlers = handlers
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        for handler in self.handlers:
            if record.levelno >= handler.level:
                handler.handle(record)
        if self._parent is not None and self._parent.hasHandlers():
            self._parent.callHandlers(record)


def _last_record(error: BaseException) -> logging.LogRecord:
    """Describe what ended a run: a stop request, a user error, or an unexpected error with its traceback."""
    is_stop_request = isinstance(error, (RunStopped, KeyboardInterrupt, SystemExit))
    level = logging.INFO if is_stop_request else logging.ERROR
    is_expected = is_stop_request or isinstance(error, UserError)
    traceback = None if is_expected else (type(error), error, error.__traceback__)
    text = str(error) or repr(error)
    return logger.makeRecord(logger.name, level, __file__, 0, "the run ended: %s", (text,), traceback)
