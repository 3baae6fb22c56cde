"""Rows of a source file in blocks, with their line or row numbers; a JSON line is parsed by who takes the block.

A source is cut into spans that can be read each by itself, by different processes: JSON lines by bytes, Parquet by row
groups; any other file is one span. Spans and blocks depend on the file alone, never on the number of processes.
JSONL, CSV, Parquet and Arrow are streamed; a JSON array is read whole.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from thresher.data.rows.parsing import MAX_ROW_BYTES, Row, Unreadable, decode_json, find_invalid, is_text
from thresher.data.sources.arrow_types import strip_extension_types
from thresher.data.sources.lines import read_lines, read_span_lines, text_lines
from thresher.data.sources.resolve import SourceFile, load_hub_dataset, open_binary
from thresher.errors import UserError
from thresher.file_names import is_safe_relative_path

ROWS_PER_BLOCK = 512
BYTES_PER_SPAN = 4 << 20
ROWS_PER_SPAN = 4096
# a block of lines ends early here, so that long lines do not add up
BYTES_PER_BLOCK = MAX_ROW_BYTES
# an array is read whole
MAX_JSON_BYTES = 2 << 30


@dataclass(frozen=True)
class SourceSpan:
    """A part of a source; the rows of its parts, in order, are the rows of the source.

    start, stop: bytes of JSON lines, a line belonging where it begins; row groups of Parquet; None is the end.
    """

    source: SourceFile
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one span; `contents` are JSON lines still to parse, or values.

    numbers: from 1 at the start of the span. last_number: the last that was read, blank lines included.
    bytes_done: how far into the stored file this block reaches, for progress only.
    """

    file: str
    unit: str  # "line" or "row": what `numbers` count
    numbers: tuple[int, ...]
    contents: tuple[Any, ...]
    last_number: int
    bytes_done: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def where(self, index: int) -> str:
        return f"{self.file}, {self.unit} {self.numbers[index]}"


def split_source(source: SourceFile) -> list[SourceSpan]:
    """Cut a source into spans of a few thousand rows where its format allows it."""
    if source.format == "jsonl" and source.compression is None:
        starts = range(0, source.size, BYTES_PER_SPAN)
        return [SourceSpan(source, start, min(start + BYTES_PER_SPAN, source.size)) for start in starts]
    if source.format == "parquet":
        with _reading(source), open_binary(source) as stored:
            return _join_row_groups(source, pq.ParquetFile(pa.PythonFile(stored, mode="r")).metadata)
    return [SourceSpan(source)]


def _join_row_groups(source: SourceFile, metadata: Any) -> list[SourceSpan]:
    spans, start, num_rows = [], 0, 0
    for number in range(metadata.num_row_groups):
        num_rows += metadata.row_group(number).num_rows
        if num_rows >= ROWS_PER_SPAN or number == metadata.num_row_groups - 1:
            spans.append(SourceSpan(source, start, number + 1))
            start, num_rows = number + 1, 0
    return spans


def read_span(span: SourceSpan) -> Iterator[Block]:
    """Read a span's rows in order."""
    readers = {
        "json": _read_json,
        "jsonl": _read_json_lines,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
        "saved_dataset": _read_saved_dataset,
        "hub_dataset": _read_hub_dataset,
    }
    with _reading(span.source):
        yield from readers[span.source.format](span)


def read_blocks(source: SourceFile) -> Iterator[Block]:
    """Read a source's rows in order, numbered from its start; a file that holds none is a `UserError`."""
    before, is_empty = 0, True
    for span in split_source(source):
        last_number = 0
        for block in read_span(span):
            last_number = block.last_number
            numbers = tuple(before + number for number in block.numbers)
            if numbers:
                is_empty = False
                yield replace(block, numbers=numbers, last_number=before + last_number)
        before += last_number
    if is_empty:
        raise UserError(f"{source.name!r} holds no rows; remove it from data_args.file_name or write it again")


@contextmanager
def _reading(source: SourceFile) -> Iterator[None]:
    try:
        yield
    # ValueError: dates that Python has no year for, and text that is not UTF-8
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise _unreadable(source, error) from error
    except Exception as error:  # what a library for a remote place raises may be anything
        if source.is_local or isinstance(error, UserError):
            raise
        raise _unreadable(source, error) from error


def _unreadable(source: SourceFile, error: Exception) -> UserError:
    packed = f" ({source.compression})" if source.compression else ""
    return UserError(
        f"{source.name!r} cannot be read as {source.format}{packed}: {error}; "
        "check that the file is whole and that its suffix is right"
    )


def _open_unpacked(source: SourceFile, stored: Any) -> Any:
    # pyarrow, not fsspec: it brings zstd without another package
    if source.compression is None:
        return stored
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), source.compression))


def _read_json_lines(span: SourceSpan) -> Iterator[Block]:
    source = span.source
    with open_binary(source) as stored:
        if span.stop is None:
            lines, start = _open_unpacked(source, stored), None
        else:
            # a few megabytes at once: object stores answer one request much sooner than many
            content, start = read_span_lines(stored, span.start, span.stop)
            lines = io.BytesIO(content)
        last_number = 0
        while chunk := read_lines(lines, ROWS_PER_BLOCK, BYTES_PER_BLOCK):
            rows = [
                (number, line)
                for number, line in enumerate(chunk, start=last_number + 1)
                if isinstance(line, Unreadable) or line.strip()
            ]
            last_number += len(chunk)
            numbers, contents = zip(*rows, strict=True) if rows else ((), ())
            done = stored.tell() if start is None else start + lines.tell()
            yield Block(source.shown, "line", numbers, contents, last_number, done)


def _read_json(span: SourceSpan) -> Iterator[Block]:
    source = span.source
    with open_binary(source) as stored:
        content = _open_unpacked(source, stored).read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise UserError(
            f"{source.name!r} holds more than {MAX_JSON_BYTES >> 30} GiB; write one object a line, as .jsonl"
        )
    try:
        values = decode_json(content.decode(json.detect_encoding(content)))
    except ValueError as error:
        hint = "; if it holds one object a line, name it .jsonl" if "Extra data" in str(error) else ""
        raise UserError(f"{source.name!r} is not valid JSON: {error}{hint}") from error
    if isinstance(values, dict):
        # an export that wraps its rows, {"data": [...]}, or else a single row
        lists = [value for value in values.values() if isinstance(value, list)]
        values = lists[0] if len(values) == 1 and lists else [values]
    if not isinstance(values, list):
        raise UserError(f"{source.name!r} holds a {type(values).__name__}; expected a list of objects")
    rows = (each if (wrong := find_invalid(each)) is None else Unreadable.of(wrong, each) for each in values)
    yield from _value_blocks(source, rows, len(values))


def _read_csv(span: SourceSpan) -> Iterator[Block]:
    source = span.source
    csv.field_size_limit(MAX_ROW_BYTES)
    with open_binary(source) as stored:
        # bytes that are not UTF-8 become what no text holds, so that the row is found to be bad, and no other
        text = io.TextIOWrapper(
            _open_unpacked(source, stored), encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        separator = "\t" if ".tsv" in source.name.lower() else ","
        reader = csv.DictReader(text_lines(text), delimiter=separator, strict=True)
        try:
            _check_header(source, list(reader.fieldnames or ()))
            # a short line leaves None, a long one a None key: both are bad rows
            for block in _value_blocks(source, iter(reader), None):
                yield replace(block, bytes_done=stored.tell())
        except csv.Error as error:
            where = f"{source.name}, line {reader.reader.line_num}"
            raise UserError(f"{where}: no CSV: {error}; are quotes closed, and doubled within quotes?") from error


def _check_header(source: SourceFile, names: list[str]) -> None:
    if not all(map(is_text, names)):
        raise UserError(f"{source.name!r} is not UTF-8; write it as UTF-8")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{source.name!r} has more than one column {', '.join(repeated)}; rename them")


def _read_parquet(span: SourceSpan) -> Iterator[Block]:
    with open_binary(span.source) as stored:
        file = pq.ParquetFile(pa.PythonFile(stored, mode="r"))
        groups = range(span.start, file.metadata.num_row_groups if span.stop is None else span.stop)
        before = sum(file.metadata.row_group(number).num_rows for number in range(span.start))
        batches = file.iter_batches(ROWS_PER_BLOCK, row_groups=list(groups))
        yield from _value_blocks(span.source, _rows_of(batches), file.metadata.num_rows, before)


def _read_arrow(span: SourceSpan) -> Iterator[Block]:
    source = span.source
    with open_binary(source) as stored:
        opened = _open_unpacked(source, stored)
        if source.compression is None and stored.read(6) == b"ARROW1":
            file = pa.ipc.open_file(pa.PythonFile(stored, mode="r"))
            batches: Any = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            if source.compression is None:
                stored.seek(0)
            batches = pa.ipc.open_stream(pa.PythonFile(opened, mode="r"))
        for block in _value_blocks(source, _rows_of(batches), None):
            yield replace(block, bytes_done=stored.tell())


def _rows_of(batches: Any) -> Iterator[Row]:
    for typed in batches:
        batch = strip_extension_types(typed)
        # slices bound the memory of Python rows where one record batch holds millions
        for start in range(0, batch.num_rows, ROWS_PER_BLOCK):
            yield from batch.slice(start, ROWS_PER_BLOCK).to_pylist()


def _read_saved_dataset(span: SourceSpan) -> Iterator[Block]:
    import datasets

    try:
        _check_data_files(span.source)
        dataset = datasets.load_from_disk(span.source.name)
    except Exception as error:  # what is wrong with its files may come out as anything
        raise _unreadable(span.source, error) from error
    yield from _read_dataset(span.source, dataset)


def _check_data_files(source: SourceFile) -> None:
    with open_binary(replace(source, name=f"{source.name}/state.json")) as stream:
        named = [each["filename"] for each in json.load(stream)["_data_files"]]
    if outside := [name for name in named if not is_safe_relative_path(name)]:
        raise ValueError(f"its state.json names {outside[0]!r}, which is no file of it")


def _read_hub_dataset(span: SourceSpan) -> Iterator[Block]:
    yield from _read_dataset(span.source, load_hub_dataset(span.source.name))


def _read_dataset(source: SourceFile, dataset: Any) -> Iterator[Block]:
    yield from _value_blocks(source, _rows_of(dataset.with_format("arrow").iter(ROWS_PER_BLOCK)), len(dataset))


def _value_blocks(source: SourceFile, rows: Iterator[Any], total: int | None, before: int = 0) -> Iterator[Block]:
    done = 0
    while chunk := tuple(itertools.islice(rows, ROWS_PER_BLOCK)):
        numbers = tuple(range(done + 1, done + len(chunk) + 1))
        done += len(chunk)
        bytes_done = source.size * (before + done) // total if total else 0
        yield Block(source.shown, "row", numbers, chunk, done, bytes_done)
