"""Messages of libraries during a run: kept in a file of the run's logs, of which the terminal shows errors alone.

These are the log records of other packages from WARNING on, and Python's warnings. They concern the developers of
these packages more than the user of a run, but explain some failures.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thresher.observability.log_files import LIBRARIES
from thresher.observability.run_log import LogFile

logger = logging.getLogger(__name__)

# packages whose loggers print on stderr themselves, and do not pass their records on
_LOUD = ("transformers", "huggingface_hub", "datasets", "accelerate", "torch", "ray")
_KEPT = 1000  # records before the directory of the logs exists


class LibraryMessages(logging.Handler):
    """Write records to a file, which exists only if there is one; the directory is created by the run itself."""

    def __init__(self, directory: Path) -> None:
        super().__init__(logging.WARNING)
        self.path = directory / LIBRARIES
        self._file: LogFile | None = None
        self._waiting: deque[logging.LogRecord] = deque(maxlen=_KEPT)

    @property
    def has_file(self) -> bool:
        return self._file is not None

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
            self._file = self._file or LogFile(self.path)
        except OSError as error:
            logger.warning("could not open %s: %s", self.path, error.strerror or error)
            self._waiting.clear()
            return
        while self._waiting:
            self._file.handle(self._waiting.popleft())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
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
        if messages.has_file:
            logger.info("messages of libraries are in %s", messages.path)
        raise
    finally:
        messages.write()
        logging.captureWarnings(False)
        root.removeHandler(messages)
        messages.close()


def silence_loud_loggers() -> None:
    """Let the root logger handle the records of packages that print on stderr; called after these are imported."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for name in _LOUD:
        library = logging.getLogger(name)
        for handler in library.handlers[:]:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.__stderr__):
                library.removeHandler(handler)
                library.propagate = True
