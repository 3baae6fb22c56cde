"""The sources as a sequence of tasks: each file's shape is found from its first row, and labelled rows are joined here.

This runs in one process, in the order of the files, so that what meets whom never depends on the number of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from thresher.data.blocks import BadRow, BlockTask
from thresher.data.readers import BadRowError, Block, parse_row, read_blocks
from thresher.data.report import FileReport
from thresher.data.rows import Shape, detect_shape, rename
from thresher.data.settings import DataSettings
from thresher.data.sources import SourceFile
from thresher.data.unpaired import Partners


class TaskReader:
    """Read the sources in order as tasks; knows each file's shape, and joins rows that need a partner."""

    def __init__(self, settings: DataSettings, sources: list[SourceFile], digests: list[str]) -> None:
        self._settings = settings
        self._sources = sources
        self._digests = digests
        self._partners = Partners()
        self.files: list[FileReport] = []

    @property
    def num_unpaired(self) -> int:
        return self._partners.num_waiting

    def tasks(self) -> Iterator[BlockTask]:
        names = self._settings.column_names
        for source, digest in zip(self._sources, self._digests, strict=True):
            shape: Shape | None = None
            columns: tuple[str, ...] = ()
            rows = 0
            for block in read_blocks(source):
                rows += len(block)
                if shape is None:
                    shape, columns = self._detect(block)
                if shape is None:
                    yield _all_bad(block)
                elif shape.is_unpaired:
                    yield self._join(block, shape)
                else:
                    yield BlockTask(block, shape.name, names, len(block))
            read = {*(shape.needs + shape.may_have if shape else ()), *names.values()}
            unused = tuple(name for name in columns if name not in read)
            self.files.append(FileReport(source.name, digest, shape.name if shape else "unreadable", rows, unused))

    def _detect(self, block: Block) -> tuple[Shape | None, tuple[str, ...]]:
        for index, content in enumerate(block.contents):
            try:
                row = parse_row(content)
            except BadRowError:
                continue
            shape = detect_shape(row, self._settings.column_names, block.where(index))
            return shape, tuple(str(name) for name in row)
        return None, ()

    def _join(self, block: Block, shape: Shape) -> BlockTask:
        joined: list[tuple[int, Any]] = []
        bad: list[BadRow] = []
        num_waiting = self._partners.num_waiting
        for index, content in enumerate(block.contents):
            try:
                row = self._partners.join(rename(parse_row(content), self._settings.column_names), shape)
            except BadRowError as error:
                bad.append(BadRow.of(block, index, error))
                continue
            if row is not None:
                joined.append((block.numbers[index], row))
        # every row is bad, half of a pair, or waits; those that wait at the end are counted as dropped then
        numbers = tuple(number for number, _ in joined)
        rows = tuple(row for _, row in joined)
        pairs = Block(block.file, block.unit, numbers, rows, block.bytes_done)
        if len(block) != len(bad) + 2 * len(joined) + self._partners.num_waiting - num_waiting:
            raise AssertionError("a row with a label was lost")
        return BlockTask(pairs, "prompt", {}, len(block), len(joined), tuple(bad))


def _all_bad(block: Block) -> BlockTask:
    # any shape does: no row of the block can be parsed, and each says why
    return BlockTask(block, "prompt", {}, len(block))
