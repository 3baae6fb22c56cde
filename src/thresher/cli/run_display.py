"""A run's display: its phases and progress, live where the terminal can redraw, as lines elsewhere.

Messages of libraries are kept in a file of the run's logs, and the terminal shows only their errors: log records of
other packages from WARNING on, and Python's warnings. They concern the developers of these packages more than the user
of a run, but explain some failures.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thresher.cli.terminal import is_live, progress_console, quiet_libraries
from thresher.observability.details import is_phase
from thresher.observability.log_files import LIBRARIES
from thresher.observability.run_log import LogFile
from thresher.observability.trackers.console import ConsoleTracker
from thresher.redact import RedactingHandler

logger = logging.getLogger(__name__)

# packages whose loggers print on stderr themselves, and do not pass their records on
_LOUD = ("transformers", "huggingface_hub", "datasets", "accelerate", "torch", "ray")
_KEPT = 1000  # records before the directory of the logs exists


class LibraryMessages(logging.Handler):
    """Write records to a file, which exists only if there is one; the directory is created by the run itself."""

    def __init__(self, directory: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = directory / LIBRARIES
        self.file: LogFile | None = None  # opened with the first record
        self._waiting: deque[logging.LogRecord] = deque(maxlen=_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        self._waiting.append(record)
        self.write()
        level = logging.ERROR if record.levelno >= logging.ERROR else logging.DEBUG
        logger.log(level, "%s: %s", record.name, record.getMessage())

    def write(self) -> None:
        """Write the records that wait for the directory, if it exists."""
        if not self._waiting or not self.path.parent.is_dir():
            return
        try:
            self.file = self.file or LogFile(self.path)
        except OSError as error:
            logger.warning("could not open %s: %s", self.path, error.strerror or error)
            self._waiting.clear()
            return
        while self._waiting:
            self.file.handle(self._waiting.popleft())

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        super().close()


@contextmanager
def keep_library_messages(directory: Path) -> Iterator[None]:
    """Collect the messages of libraries in the logs of a run; if it fails, say where they are."""
    messages, root = LibraryMessages(directory), logging.getLogger()
    root.addHandler(messages)
    logging.captureWarnings(True)
    try:
        yield
    except Exception:
        messages.write()
        if messages.file is not None:
            logger.info("messages of libraries are in %s", messages.path)
        raise
    finally:
        messages.write()
        logging.captureWarnings(False)
        root.removeHandler(messages)
        messages.close()


def silence_loud_loggers() -> None:
    """Let the root logger handle the records of packages that print on stderr; called after these are imported."""
    quiet_libraries()
    for name in _LOUD:
        library = logging.getLogger(name)
        for handler in library.handlers[:]:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.__stderr__):
                library.removeHandler(handler)
                library.propagate = True


@contextmanager
def run_display(log_directory: Path) -> Iterator[ConsoleTracker]:
    """Show a run until the block ends, and keep the messages of libraries in its logs."""
    console, package = ConsoleTracker(progress_console(), is_live=is_live()), logging.getLogger("thresher")
    phases = RedactingHandler(logging.INFO, lambda record, text: console.show_work(text))
    phases.addFilter(is_phase)
    with keep_library_messages(log_directory), console.displayed():
        package.addHandler(phases)
        try:
            yield console
        finally:
            package.removeHandler(phases)
