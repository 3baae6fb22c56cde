"""The sources as tasks: each file's shape is found from its first row, and labelled rows are joined here.

A task that needs nothing but its span may be read by any process. Rows with labels are read and joined in one, in the
order of the files, so that what meets whom never depends on the number of others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thresher.data.prepare.block_worker import BadRow, BlockTask
from thresher.data.rows.formats import FORMAT_BY_NAME, RowFormat, detect_format, rename
from thresher.data.rows.parsing import BadRowError, parse_row
from thresher.data.rows.unpaired import UnpairedJoiner
from thresher.data.settings import DataSettings
from thresher.data.sources.readers import Block, SourceSpan, read_blocks, read_span, split_source
from thresher.data.sources.resolve import SourceFile


@dataclass(frozen=True)
class SourceShape:
    """What a file's first row tells; a file without a row that can be parsed has no shape."""

    source: SourceFile
    shape: RowFormat | None
    unused_columns: tuple[str, ...]


@dataclass(frozen=True)
class SpanTask:
    """A span and how its file is to be read.

    number, file: its place among all spans, and its file's place among the sources.
    skip_blocks: how many of its first blocks an earlier process has finished.
    """

    number: int
    file: int
    span: SourceSpan
    shape: str
    column_names: Mapping[str, str]
    skip_blocks: int = 0

    @property
    def is_unpaired(self) -> bool:
        return FORMAT_BY_NAME[self.shape].is_unpaired


def read_task(task: SpanTask) -> Iterator[BlockTask]:
    """Read a span whose rows need no partner, in blocks."""
    for number, block in enumerate(read_span(task.span)):
        if number >= task.skip_blocks:
            yield BlockTask(task.number, block, task.shape, task.column_names, len(block))


class TaskReader:
    """Know the spans of all sources in order, and join rows that need a partner."""

    def __init__(self, settings: DataSettings, sources: Sequence[SourceFile]) -> None:
        self._partners = UnpairedJoiner()
        names = settings.column_names
        self.files = [_find_shape(source, names) for source in sources]
        spans = [(number, span) for number, source in enumerate(sources) for span in split_source(source)]
        shapes = [each.shape.name if each.shape else "prompt" for each in self.files]
        self.spans = [SpanTask(number, file, span, shapes[file], names) for number, (file, span) in enumerate(spans)]

    @property
    def num_unpaired(self) -> int:
        return self._partners.num_waiting

    def remaining(self, span: int, blocks: int) -> list[SpanTask]:
        """List what follows after so many blocks of a span; rows with labels that came before find their places."""
        for task in self.spans[:span]:
            if task.is_unpaired:
                for _ in self.read(task):
                    pass
        return [replace(task, skip_blocks=blocks if task.number == span else 0) for task in self.spans[span:]]

    def read(self, task: SpanTask) -> Iterator[BlockTask]:
        """Read a span in blocks, rows with labels joined; must be called in the order of the spans."""
        if not task.is_unpaired:
            yield from read_task(task)
            return
        for number, block in enumerate(read_span(task.span)):
            joined = self._join(block, task)
            if number >= task.skip_blocks:
                yield joined

    def _join(self, block: Block, task: SpanTask) -> BlockTask:
        joined: list[tuple[int, Any]] = []
        bad: list[BadRow] = []
        num_waiting = self._partners.num_waiting
        for index, content in enumerate(block.contents):
            try:
                row = self._partners.join(rename(parse_row(content), task.column_names), FORMAT_BY_NAME[task.shape])
            except BadRowError as error:
                bad.append(BadRow.of(block, index, error))
                continue
            if row is not None:
                joined.append((block.numbers[index], row))
        # every row is bad, half of a pair, or waits; those that wait at the end are counted as dropped then
        pairs = replace(block, numbers=tuple(number for number, _ in joined), contents=tuple(row for _, row in joined))
        if len(block) != len(bad) + 2 * len(joined) + self._partners.num_waiting - num_waiting:
            raise AssertionError("a row with a label was lost")
        return BlockTask(task.number, pairs, "prompt", {}, len(block), len(joined), tuple(bad))


def _find_shape(source: SourceFile, names: Mapping[str, str]) -> SourceShape:
    for block in read_blocks(source):
        for index, content in enumerate(block.contents):
            try:
                row = parse_row(content)
            except BadRowError:
                continue
            shape = detect_format(row, names, block.where(index))
            read = {*shape.required, *shape.optional, *names.values()}
            return SourceShape(source, shape, tuple(str(name) for name in row if name not in read))
    # no row can be parsed, and each says why: any shape does
    return SourceShape(source, None, ())
