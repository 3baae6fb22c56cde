"""Split the sources into tasks: detect the row format of each file from its first row, and join labelled rows.

Any process can read the span of a task, except for labelled rows: one process reads and joins these in file order, so
that the pairs do not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thresher.data.prepare.block_worker import BadRow, BlockTask
from thresher.data.rows.formats import FORMAT_BY_NAME, detect_format, rename
from thresher.data.rows.parsing import BadRowError, parse_row
from thresher.data.rows.unpaired import UnpairedJoiner
from thresher.data.settings import DataSettings
from thresher.data.sources.readers import Block, SourceSpan, read_blocks, read_span, split_source
from thresher.data.sources.resolve import SourceFile, resolve_sources
from thresher.data.tokenization.chat_template import Template, load_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SourceFormat:
    """Row format of a file, detected from its first row; None if no row can be parsed."""

    source: SourceFile
    format_name: str | None
    unused_columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpanTask:
    """A span and the format of its rows.

    number: index among all spans. file: index of its file among the sources.
    skip_blocks: number of leading blocks that an earlier process has finished.
    """

    number: int
    file: int
    span: SourceSpan
    row_format: str
    column_names: Mapping[str, str]
    skip_blocks: int = 0

    @property
    def is_unpaired(self) -> bool:
        return FORMAT_BY_NAME[self.row_format].is_unpaired


def read_task(task: SpanTask) -> Iterator[BlockTask]:
    """Read a span of paired rows in blocks."""
    for number, block in enumerate(read_span(task.span)):
        if number >= task.skip_blocks:
            yield BlockTask(task.number, block, task.row_format, task.column_names, len(block))


def find_template(settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> Template:
    """Load the template of the settings; rows of token ids use none, so their tokenizer may lack a chat template."""
    name = settings.template
    if name == "auto" and not tokenizer.chat_template:
        formats = {
            _detect_source(each, settings.column_names).format_name for each in resolve_sources(settings.file_names)
        }
        if all(each is not None and FORMAT_BY_NAME[each].is_tokenized for each in formats):
            name = "raw"
    return load_template(tokenizer, name, settings.template_arguments, settings.key("template"))


class TaskReader:
    """The spans of all sources in order; reads spans and joins labelled rows to pairs."""

    def __init__(self, settings: DataSettings, sources: Sequence[SourceFile]) -> None:
        self._joiner = UnpairedJoiner()
        names = settings.column_names
        sources = [replace(source, max_rows=settings.max_samples) for source in sources]
        self.files = [_detect_source(source, names) for source in sources]
        spans = [(number, span) for number, source in enumerate(sources) for span in split_source(source)]
        # if no row of a file can be parsed, each is reported as bad whatever the format
        formats = [each.format_name or "prompt" for each in self.files]
        self.spans = [SpanTask(number, file, span, formats[file], names) for number, (file, span) in enumerate(spans)]

    @property
    def num_unpaired(self) -> int:
        return self._joiner.num_waiting

    def remaining(self, span: int, blocks: int) -> list[SpanTask]:
        """Return the tasks after the first `blocks` blocks of a span; joins the labelled rows before it again."""
        for task in self.spans[:span]:
            if task.is_unpaired:
                for _ in self.read(task):
                    pass
        return [replace(task, skip_blocks=blocks if task.number == span else 0) for task in self.spans[span:]]

    def read(self, task: SpanTask) -> Iterator[BlockTask]:
        """Read a span in blocks, with labelled rows joined; must be called in the order of the spans."""
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
        num_waiting = self._joiner.num_waiting
        for index, content in enumerate(block.contents):
            try:
                row = self._joiner.join(rename(parse_row(content), task.column_names), FORMAT_BY_NAME[task.row_format])
            except BadRowError as error:
                bad.append(BadRow.of(block, index, error))
                continue
            if row is not None:
                joined.append((block.numbers[index], row))
        # every row is bad, one side of a pair, or waiting; rows that wait at the end are counted as dropped
        pairs = replace(block, numbers=tuple(number for number, _ in joined), contents=tuple(row for _, row in joined))
        if len(block) != len(bad) + 2 * len(joined) + self._joiner.num_waiting - num_waiting:
            raise AssertionError("the counts of labelled rows do not add up")
        return BlockTask(task.number, pairs, "prompt", {}, len(block), len(joined), tuple(bad))


def _detect_source(source: SourceFile, names: Mapping[str, str]) -> SourceFormat:
    for block in read_blocks(source):
        for index, content in enumerate(block.contents):
            try:
                row = parse_row(content)
            except BadRowError:
                continue
            row_format = detect_format(row, names, block.where(index))
            used = {*row_format.required, *row_format.optional, *names.values()}
            return SourceFormat(source, row_format.name, tuple(str(name) for name in row if name not in used))
    return SourceFormat(source, None)
