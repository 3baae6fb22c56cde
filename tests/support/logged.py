"""Capture records of the `thresher` loggers in fixtures of any scope; pytest's caplog works only in tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()  # raises if the arguments do not match the message
        self._records.append(record)


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[logging.LogRecord]]:
    """Collect records of a level and above."""
    package, records = logging.getLogger("thresher"), list[logging.LogRecord]()
    collector, before = _Collector(records), package.level
    package.addHandler(collector)
    package.setLevel(level)
    try:
        yield records
    finally:
        package.removeHandler(collector)
        package.setLevel(before)
