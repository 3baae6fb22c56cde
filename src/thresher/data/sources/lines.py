"""Read lines with bounded memory, even from a file without line ends or one that decompresses to gigabytes.

A line longer than `MAX_ROW_BYTES` is skipped and returned as `Unreadable`, so that it is counted and reading continues.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from thresher.data.rows.parsing import MAX_ROW_BYTES, Unreadable

_EXCERPT_BYTES = 1000
_SKIP_BYTES = 1 << 20
_TOO_LONG = f"a line of more than {MAX_ROW_BYTES >> 20} MiB; is a line end missing?"


def read_lines(stream: Any, max_lines: int, max_bytes: int) -> list[bytes | Unreadable]:
    """Read the next lines, at least one unless the stream has ended; stop at `max_lines` or after `max_bytes`."""
    lines: list[bytes | Unreadable] = []
    num_bytes = 0
    while len(lines) < max_lines and num_bytes < max_bytes and (line := stream.readline(MAX_ROW_BYTES)):
        num_bytes += len(line)
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            _skip_line(stream)
            line = Unreadable(_TOO_LONG, line[:_EXCERPT_BYTES].decode("utf-8", errors="replace"))
        lines.append(line)
    return lines


def read_span_lines(stored: Any, start: int, stop: int) -> tuple[bytes, int]:
    """Return the lines that begin in [start, stop) and the offset of the first; a too long last line is cut off."""
    if start > 0:
        # the line that contains the byte before `start` belongs to the previous span
        stored.seek(start - 1)
        _skip_line(stored, stop)
    begin = stored.tell()
    if begin >= stop:
        return b"", begin
    content = stored.read(stop - begin)
    return (content if content.endswith(b"\n") else content + stored.readline(MAX_ROW_BYTES)), begin


def _skip_line(stream: Any, stop: int | None = None) -> None:
    """Skip the rest of a line, or up to `stop`, so that a line over many spans is not read again for each of them."""
    while (piece := stream.readline(_SKIP_BYTES)) and not piece.endswith(b"\n"):
        if stop is not None and stream.tell() >= stop:
            return


def text_lines(text: Any) -> Iterator[str]:
    """Yield lines for the CSV reader; a too long one is a `csv.Error`."""
    while line := text.readline(MAX_ROW_BYTES):
        if len(line) == MAX_ROW_BYTES:
            raise csv.Error(_TOO_LONG)
        yield line
