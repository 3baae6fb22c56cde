"""Lines of a stream, none longer than a bound in memory: a file without line ends, or one that unpacks to gigabytes.

A longer line is read past and stands as `Unreadable`, so that it is counted and those after it are read.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from thresher.data.rows.parsing import MAX_ROW_BYTES, Unreadable

_SHOWN_BYTES = 1000
_SKIPPED_AT_ONCE = 1 << 20
_TOO_LONG = f"a line of more than {MAX_ROW_BYTES >> 20} MiB; is a line end missing?"


def read_lines(stream: Any, max_lines: int, max_bytes: int) -> list[bytes | Unreadable]:
    """Read the next lines, at least one if there is one, until there are so many or they have so many bytes."""
    lines: list[bytes | Unreadable] = []
    num_bytes = 0
    while len(lines) < max_lines and num_bytes < max_bytes and (line := stream.readline(MAX_ROW_BYTES)):
        num_bytes += len(line)
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            _skip_line(stream)
            line = Unreadable(_TOO_LONG, line[:_SHOWN_BYTES].decode("utf-8", errors="replace"))
        lines.append(line)
    return lines


def read_span_lines(stored: Any, start: int, stop: int) -> tuple[bytes, int]:
    """Return whole lines, but for one that is too long, and where the first begins."""
    if start > 0:
        # the line that holds the byte before `start` belongs to the span before
        stored.seek(start - 1)
        _skip_line(stored, stop)
    begin = stored.tell()
    if begin >= stop:
        return b"", begin
    content = stored.read(stop - begin)
    return (content if content.endswith(b"\n") else content + stored.readline(MAX_ROW_BYTES)), begin


def _skip_line(stream: Any, stop: int | None = None) -> None:
    """Read past the end of a line, or until `stop`: a long line must not be read again for each span that it covers."""
    while (piece := stream.readline(_SKIPPED_AT_ONCE)) and not piece.endswith(b"\n"):
        if stop is not None and stream.tell() >= stop:
            return


def text_lines(text: Any) -> Iterator[str]:
    """Yield lines of text for the CSV reader."""
    while line := text.readline(MAX_ROW_BYTES):
        if len(line) == MAX_ROW_BYTES:
            raise csv.Error(_TOO_LONG)
        yield line
