"""Read the rows of a source in blocks, with line or row numbers; JSON lines are parsed later, by the block's consumer.

A source is split into spans that processes read independently: JSON lines by bytes, Parquet by row groups; any other
file is one span. Spans and blocks depend on the file alone, never on the number of processes.
JSONL, CSV, Parquet and Arrow are streamed; a JSON array is read into memory. Lines are read with bounded memory, even
from a file without line ends or one that decompresses to gigabytes: a line longer than `MAX_ROW_BYTES` is skipped and
returned as `Unreadable`, so it is counted and reading continues.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from thresher.data.rows.parsing import MAX_ROW_BYTES, Row, Unreadable, decode_json, find_invalid, is_text
from thresher.data.sources.resolve import SourceFile, load_hub_dataset, open_binary
from thresher.durable import is_safe_relative_path
from thresher.errors import UserError


def strip_extension_types(batch: Any) -> Any:
    """Cast a record batch or table to the storage types of its columns.

    An extension type may run Python code on a file's bytes: Ray, for example, registers one that unpickles its values,
    and a file only has to name it.
    """
    fields = [_storage_field(field) for field in batch.schema]
    if all(new.type.equals(old.type) for new, old in zip(fields, batch.schema, strict=True)):
        return batch
    return batch.cast(pa.schema(fields))


def _storage_field(field: Any) -> Any:
    return pa.field(field.name, _storage_type(field.type, field.name), field.nullable)


def _storage_type(data_type: Any, column: str) -> Any:
    if isinstance(data_type, pa.BaseExtensionType):
        return _storage_type(data_type.storage_type, column)
    if pa.types.is_struct(data_type):
        return pa.struct([_storage_field(data_type.field(number)) for number in range(data_type.num_fields)])
    if pa.types.is_list(data_type):
        return pa.list_(_storage_field(data_type.value_field))
    if pa.types.is_large_list(data_type):
        return pa.large_list(_storage_field(data_type.value_field))
    if pa.types.is_fixed_size_list(data_type):
        return pa.list_(_storage_field(data_type.value_field), data_type.list_size)
    if pa.types.is_map(data_type):
        return pa.map_(_storage_field(data_type.key_field), _storage_field(data_type.item_field))
    if _has_extension(data_type):
        raise UserError(f"column {column!r} has the unsupported type {data_type}; store it as a plain type")
    return data_type


def _has_extension(data_type: Any) -> bool:
    children = [data_type.field(number).type for number in range(data_type.num_fields)]
    if pa.types.is_dictionary(data_type):
        children.append(data_type.value_type)
    return isinstance(data_type, pa.BaseExtensionType) or any(map(_has_extension, children))


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
    """Skip the rest of a line, or up to `stop`: a line over many spans must not be read again for each of them."""
    while (piece := stream.readline(_SKIP_BYTES)) and not piece.endswith(b"\n"):
        if stop is not None and stream.tell() >= stop:
            return


def text_lines(text: Any) -> Iterator[str]:
    """Yield lines for the CSV reader; a too long one is a `csv.Error`."""
    while line := text.readline(MAX_ROW_BYTES):
        if len(line) == MAX_ROW_BYTES:
            raise csv.Error(_TOO_LONG)
        yield line


ROWS_PER_BLOCK = 512
BYTES_PER_SPAN = 4 << 20
ROWS_PER_SPAN = 4096
# bounds the memory of a block of long lines
BYTES_PER_BLOCK = MAX_ROW_BYTES
MAX_JSON_BYTES = 2 << 30
# keys of a JSON file under which exports put their rows, next to other keys
_WRAPPERS = ("data", "rows", "train", "examples")


@dataclass(frozen=True)
class SourceSpan:
    """A range of a source; the rows of its spans, in order, are the rows of the source."""

    source: SourceFile
    # bytes of JSON lines (a line belongs to the span in which it begins) or row groups of Parquet
    start: int = 0
    stop: int | None = None  # None: the end


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one span."""

    file: str
    unit: str  # "line" or "row"
    numbers: tuple[int, ...]  # from 1 at the start of the span
    contents: tuple[Any, ...]  # unparsed JSON lines or values
    last_number: int  # the last one read, including blank lines
    bytes_done: int = 0  # offset in the stored file after this block, for progress only

    def __len__(self) -> int:
        return len(self.numbers)

    def where(self, index: int) -> str:
        return f"{self.file}, {self.unit} {self.numbers[index]}"


def split_source(source: SourceFile) -> list[SourceSpan]:
    """Split a source into spans of a few thousand rows where its format allows it; one span if rows are limited."""
    if source.max_rows is not None:
        return [SourceSpan(source)]
    if source.format == "jsonl" and source.compression is None:
        starts = range(0, source.size, BYTES_PER_SPAN)
        return [SourceSpan(source, start, min(start + BYTES_PER_SPAN, source.size)) for start in starts]
    if source.format == "parquet":
        with _translate_errors(source), open_binary(source) as stored:
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
    """Read the rows of a span in order."""
    readers: dict[str, Callable[[SourceSpan], Iterator[Block]]] = {
        "json": _read_json,
        "jsonl": _read_json_lines,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
        "saved_dataset": _read_saved_dataset,
        "hub_dataset": lambda span: _read_dataset(span.source, load_hub_dataset(span.source.name)),
    }
    with _translate_errors(span.source):
        blocks = readers[span.source.format](span)
        yield from blocks if span.source.max_rows is None else _first_rows(blocks, span.source.max_rows)


def _first_rows(blocks: Iterator[Block], count: int) -> Iterator[Block]:
    for block in blocks:
        if len(block) >= count:
            numbers, contents = block.numbers[:count], block.contents[:count]
            yield replace(block, numbers=numbers, contents=contents, last_number=numbers[-1])
            return
        count -= len(block)
        yield block


def read_blocks(source: SourceFile) -> Iterator[Block]:
    """Read the rows of a source in order, numbered from its start; a file without rows is a `UserError`."""
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
        raise UserError(f"{source.name!r} has no rows; write it again, or do not name it")


@contextmanager
def _translate_errors(source: SourceFile) -> Iterator[None]:
    try:
        yield
    # ValueError: dates beyond Python's range, and text that is not UTF-8
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise _unreadable(source, error) from error
    except Exception as error:  # remote filesystem libraries may raise anything
        if source.is_local or isinstance(error, UserError):
            raise
        raise _unreadable(source, error) from error


def _unreadable(source: SourceFile, error: Exception) -> UserError:
    compression = f" ({source.compression})" if source.compression else ""
    return UserError(
        f"{source.name!r} cannot be read as {source.format}{compression}: {error}; "
        "check that the file is complete and that its suffix is right"
    )


def _decompress(source: SourceFile, stored: Any) -> Any:
    # pyarrow instead of fsspec: it supports zstd without another package
    if source.compression is None:
        return stored
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), source.compression))


def _read_json_lines(span: SourceSpan) -> Iterator[Block]:
    source = span.source
    with open_binary(source) as stored:
        if span.stop is None:
            lines, start = _decompress(source, stored), None
        else:
            # one request per span: many small ones are slow on object stores
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
        content = _decompress(source, stored).read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise UserError(
            f"{source.name!r} is larger than {MAX_JSON_BYTES >> 30} GiB; write one object per line, as .jsonl"
        )
    try:
        values = decode_json(content.decode(json.detect_encoding(content)))
    except ValueError as error:
        hint = "; if it has one object per line, name it .jsonl" if "Extra data" in str(error) else ""
        raise UserError(f"{source.name!r} is not valid JSON: {error}{hint}") from error
    if isinstance(values, dict):
        values = _unwrapped(values)
    if not isinstance(values, list):
        raise UserError(f"{source.name!r} contains a {type(values).__name__}; expected a list of objects")
    rows = (row if (reason := find_invalid(row)) is None else Unreadable.of(reason, row) for row in values)
    yield from _value_blocks(source, rows, lambda number: source.size * number // len(values))


def _unwrapped(values: Row) -> list[Any]:
    """Return the rows of an export that wraps them, such as {"version": 1, "data": [...]}, else the object as a row."""
    lists = {name: value for name, value in values.items() if isinstance(value, list)}
    if len(values) == len(lists) == 1:
        return next(iter(lists.values()))
    objects = [name for name, value in lists.items() if value and all(isinstance(item, dict) for item in value)]
    return lists[objects[0]] if len(objects) == 1 and objects[0] in _WRAPPERS else [values]


def _read_csv(span: SourceSpan) -> Iterator[Block]:
    source = span.source
    csv.field_size_limit(MAX_ROW_BYTES)
    with open_binary(source) as stored:
        # surrogateescape: a row that is not UTF-8 becomes a bad row, and the others are read
        text = io.TextIOWrapper(_decompress(source, stored), encoding="utf-8-sig", errors="surrogateescape", newline="")
        separator = "\t" if ".tsv" in source.name.lower() else ","
        reader = csv.DictReader(text_lines(text), delimiter=separator, strict=True)
        try:
            _check_header(source, list(reader.fieldnames or ()))
            # missing fields become None and extra ones get the key None: both are bad rows
            yield from _value_blocks(source, iter(reader), lambda _: stored.tell())
        except csv.Error as error:
            where = f"{source.name}, line {reader.reader.line_num}"
            raise UserError(f"{where}: not valid CSV: {error}; close quotes, and double them within quotes") from error


def _check_header(source: SourceFile, names: list[str]) -> None:
    if not all(map(is_text, names)):
        raise UserError(f"{source.name!r} is not UTF-8; write it as UTF-8")
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise UserError(f"{source.name!r} has repeated columns: {', '.join(repeated)}; rename them")


def _read_parquet(span: SourceSpan) -> Iterator[Block]:
    with open_binary(span.source) as stored:
        file = pq.ParquetFile(pa.PythonFile(stored, mode="r"))
        groups = range(span.start, file.metadata.num_row_groups if span.stop is None else span.stop)
        before = sum(file.metadata.row_group(number).num_rows for number in range(span.start))
        batches = file.iter_batches(ROWS_PER_BLOCK, row_groups=list(groups))
        total, size = file.metadata.num_rows, span.source.size
        rows = _iter_rows(span.source, batches)
        yield from _value_blocks(span.source, rows, lambda number: size * (before + number) // total)


def _read_arrow(span: SourceSpan) -> Iterator[Block]:
    source = span.source
    with open_binary(source) as stored:
        opened = _decompress(source, stored)
        if source.compression is None and stored.read(6) == b"ARROW1":
            file = pa.ipc.open_file(pa.PythonFile(stored, mode="r"))
            batches: Any = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            if source.compression is None:
                stored.seek(0)
            batches = pa.ipc.open_stream(pa.PythonFile(opened, mode="r"))
        yield from _value_blocks(source, _iter_rows(source, batches), lambda _: stored.tell())


def _iter_rows(source: SourceFile, batches: Any) -> Iterator[Row]:
    for typed in batches:
        _check_header(source, typed.schema.names)
        batch = strip_extension_types(typed)
        # slices bound the memory of Python rows: one record batch may have millions
        for start in range(0, batch.num_rows, ROWS_PER_BLOCK):
            yield from batch.slice(start, ROWS_PER_BLOCK).to_pylist()


def _read_saved_dataset(span: SourceSpan) -> Iterator[Block]:
    import datasets

    try:
        with open_binary(replace(span.source, name=f"{span.source.name}/state.json")) as stream:
            names = [file["filename"] for file in json.load(stream)["_data_files"]]
        if outside := [name for name in names if not is_safe_relative_path(name)]:
            raise ValueError(f"its state.json names {outside[0]!r}, which is outside its directory")
        dataset = datasets.load_from_disk(span.source.name)
    except Exception as error:  # `datasets` raises many types for damaged files
        raise _unreadable(span.source, error) from error
    yield from _read_dataset(span.source, dataset)


def _read_dataset(source: SourceFile, dataset: Any) -> Iterator[Block]:
    rows = _iter_rows(source, dataset.with_format("arrow").iter(ROWS_PER_BLOCK))
    return _value_blocks(source, rows, lambda number: source.size * number // len(dataset))


def _value_blocks(source: SourceFile, rows: Iterator[Any], bytes_done: Callable[[int], int]) -> Iterator[Block]:
    """Group rows into blocks; bytes_done maps the number of rows read to an offset in the stored file."""
    done = 0
    while chunk := tuple(itertools.islice(rows, ROWS_PER_BLOCK)):
        numbers = tuple(range(done + 1, done + len(chunk) + 1))
        done += len(chunk)
        yield Block(source.shown, "row", numbers, chunk, done, bytes_done(done))
