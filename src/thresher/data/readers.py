"""Rows of a source file in blocks, with their line or row numbers; a JSON line is parsed by who takes the block.

A block is what one process takes at a time. Blocks depend on the file alone, never on the number of processes.
JSONL, CSV, Parquet and Arrow are streamed; a JSON array is read whole.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from thresher.data.sources import SourceFile, load_hub_dataset, open_binary
from thresher.errors import UserError

ROWS_PER_BLOCK = 512
Row = dict[str, Any]


class BadRowError(Exception):
    """A row that cannot become a pair; its text is the reason."""


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one file; `contents` are JSON lines still to parse, or values.

    bytes_done: how far into the stored file this block reaches, for progress only.
    """

    file: str
    unit: str  # "line" or "row": what `numbers` count, from 1
    numbers: tuple[int, ...]
    contents: tuple[Any, ...]
    bytes_done: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def where(self, index: int) -> str:
        return f"{self.file}, {self.unit} {self.numbers[index]}"


def parse_row(content: Any) -> Row:
    """Turn a block's content into a row of columns, or raise `BadRowError`."""
    if isinstance(content, bytes):
        try:
            content = json.loads(content)
        except UnicodeDecodeError as error:
            raise BadRowError(f"not UTF-8: {error.reason} at byte {error.start}") from error
        except ValueError as error:
            raise BadRowError(f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadRowError(f"expected an object with columns, got {type(content).__name__}")
    return content


def read_blocks(source: SourceFile) -> Iterator[Block]:
    """Read a source's rows in order; a file that holds none is a `UserError`."""
    readers = {
        "json": _read_json,
        "jsonl": _read_json_lines,
        "csv": _read_csv,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
        "saved_dataset": _read_saved_dataset,
        "hub_dataset": _read_hub_dataset,
    }
    blocks = readers[source.format](source)
    try:
        first = next(blocks, None)
    except (pa.ArrowInvalid, OSError, EOFError, csv.Error, UnicodeDecodeError) as error:
        raise _unreadable(source, error) from error
    if first is None:
        raise UserError(f"{source.name!r} holds no rows; remove it from data_args.file_name or write it again")
    yield first
    try:
        yield from blocks
    except (pa.ArrowInvalid, OSError, EOFError, csv.Error, UnicodeDecodeError) as error:
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


def _read_json_lines(source: SourceFile) -> Iterator[Block]:
    with open_binary(source) as stored:
        lines = enumerate(_open_unpacked(source, stored), start=1)
        rows = ((number, line) for number, line in lines if line.strip())
        while chunk := list(itertools.islice(rows, ROWS_PER_BLOCK)):
            numbers, contents = zip(*chunk, strict=True)
            yield Block(source.name, "line", numbers, contents, stored.tell())


def _read_json(source: SourceFile) -> Iterator[Block]:
    with open_binary(source) as stored:
        text = _open_unpacked(source, stored).read()
    try:
        values = json.loads(text)
    except ValueError as error:
        hint = "; if it holds one object a line, name it .jsonl" if "Extra data" in str(error) else ""
        raise UserError(f"{source.name!r} is not valid JSON: {error}{hint}") from error
    if isinstance(values, dict):
        # an export that wraps its rows, {"data": [...]}, or else a single row
        lists = [value for value in values.values() if isinstance(value, list)]
        values = lists[0] if len(values) == 1 and lists else [values]
    if not isinstance(values, list):
        raise UserError(f"{source.name!r} holds a {type(values).__name__}; expected a list of objects")
    yield from _value_blocks(source, iter(values), len(values))


def _read_csv(source: SourceFile) -> Iterator[Block]:
    csv.field_size_limit(1 << 30)
    with open_binary(source) as stored:
        text = io.TextIOWrapper(_open_unpacked(source, stored), encoding="utf-8-sig", newline="")
        separator = "\t" if ".tsv" in source.name.lower() else ","
        reader = csv.DictReader(text, delimiter=separator, strict=True)
        # a short line leaves None, a long one a None key: both are bad rows, found by the row's shape
        for block in _value_blocks(source, iter(reader), None):
            yield Block(block.file, block.unit, block.numbers, block.contents, stored.tell())


def _read_parquet(source: SourceFile) -> Iterator[Block]:
    with open_binary(source) as stored:
        file = pq.ParquetFile(pa.PythonFile(stored, mode="r"))
        rows = (row for batch in file.iter_batches(ROWS_PER_BLOCK) for row in batch.to_pylist())
        yield from _value_blocks(source, rows, file.metadata.num_rows)


def _read_arrow(source: SourceFile) -> Iterator[Block]:
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
            position = stored.tell()
            yield Block(block.file, block.unit, block.numbers, block.contents, position)


def _rows_of(batches: Any) -> Iterator[Row]:
    for batch in batches:
        # slices bound the memory of Python rows where one record batch holds millions
        for start in range(0, batch.num_rows, ROWS_PER_BLOCK):
            yield from batch.slice(start, ROWS_PER_BLOCK).to_pylist()


def _read_saved_dataset(source: SourceFile) -> Iterator[Block]:
    import datasets

    yield from _read_dataset(source, datasets.load_from_disk(source.name))


def _read_hub_dataset(source: SourceFile) -> Iterator[Block]:
    yield from _read_dataset(source, load_hub_dataset(source.name))


def _read_dataset(source: SourceFile, dataset: Any) -> Iterator[Block]:
    yield from _value_blocks(source, _rows_of(dataset.with_format("arrow").iter(ROWS_PER_BLOCK)), len(dataset))


def _value_blocks(source: SourceFile, rows: Iterator[Any], total: int | None) -> Iterator[Block]:
    done = 0
    while chunk := tuple(itertools.islice(rows, ROWS_PER_BLOCK)):
        numbers = tuple(range(done + 1, done + len(chunk) + 1))
        done += len(chunk)
        yield Block(source.name, "row", numbers, chunk, source.size * done // total if total else 0)
