"""Blocks of rows: read from spans of the sources by tasks, and converted to record batches of pairs.

Any process can read a span and convert a block. Labelled rows are the exception: one process reads and joins them in
file order, so the pairs do not depend on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from thresher.data.example import Example, Kind, Response, StoredKind, kind_of
from thresher.data.prepare.findings import Keys, to_keys
from thresher.data.rows.formats import (
    FORMAT_BY_NAME,
    PreferenceRow,
    RowFormat,
    check_columns,
    detect_format,
    read_label,
    read_numbers,
    read_order,
    read_subset,
    rename,
    score_margin,
    split_answer,
    to_preference_row,
    with_system,
)
from thresher.data.rows.messages import SYSTEM_ROLES, is_empty
from thresher.data.rows.parsing import BadRowError, Row, Unreadable, find_invalid, parse_row, read_tokenized
from thresher.data.settings import DataSettings
from thresher.data.sources.readers import Block, SourceSpan, read_blocks, read_span, split_source
from thresher.data.sources.resolve import SourceFile, resolve_sources
from thresher.data.store.arrow_schema import hash_example, pairs_to_record_batch
from thresher.data.tokenization.chat_template import RenderedRow, Template, load_template, render
from thresher.data.tokenization.control_tokens import ControlTokens
from thresher.data.tokenization.tokenizer import RowTokenizer, TokenizedRow, needed_length, truncate
from thresher.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class BadRow:
    """An invalid row and the reason."""

    file: str
    unit: str
    number: int
    reason: str
    content: Any

    @classmethod
    def of(cls, block: Block, index: int, error: BadRowError) -> BadRow:
        return cls(block.file, block.unit, block.numbers[index], str(error), _json_content(block.contents[index]))


@dataclass(frozen=True)
class BlockTask:
    """A block of a span and the format of its rows; bad and joined rows were counted while reading it."""

    span: int
    block: Block
    row_format: str
    column_names: Mapping[str, str]
    rows_read: int
    rows_joined: int = 0
    bad: tuple[BadRow, ...] = ()


@dataclass
class BlockResult:
    """The pairs of a block and the counts of its other rows."""

    # position of the block, as in `BlockTask` and `Block`
    span: int
    last_number: int
    bytes_done: int
    rows_read: int
    rows_joined: int = 0
    pairs: Any = None
    keys: Keys = field(default_factory=lambda: np.zeros(0, np.uint64))
    swapped_keys: Keys = field(default_factory=lambda: np.zeros(0, np.uint64))
    bad: list[BadRow] = field(default_factory=list)  # numbered from the start of the span
    dropped: Counter[str] = field(default_factory=Counter)
    identical_responses: int = 0  # dropped from lists
    desirable: int = 0
    too_long: list[int] = field(default_factory=list)  # the smallest sequence_length that keeps each dropped pair
    truncated: Counter[str] = field(default_factory=Counter)
    splits_moved: int = 0
    headers_shortened: int = 0
    findings: dict[str, list[int]] = field(default_factory=dict)  # indices into the pairs


class BlockWorker:
    """Render, tokenize, truncate and hash the rows of blocks; keeps no state between blocks."""

    def __init__(self, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, template: Template) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._template = template
        self._control_tokens = ControlTokens(tokenizer, template)
        self._to_tokens = RowTokenizer(tokenizer, template, self._control_tokens.placeholders)

    def __call__(self, task: BlockTask) -> BlockResult:
        block = task.block
        result = BlockResult(
            task.span, block.last_number, block.bytes_done, task.rows_read, task.rows_joined, bad=list(task.bad)
        )
        kept: list[Example] = []
        stored_kind = FORMAT_BY_NAME[task.row_format].kind
        kind = kind_of(stored_kind)
        for tokenized, findings in self._tokenize(task, result):
            pair = self._keep(tokenized, kind, result)
            if isinstance(pair, str):
                result.dropped[pair] += 1
                continue
            for name in findings:
                result.findings.setdefault(name, []).append(len(kept))
            kept.append(pair)
        hashes = [hash_example(pair) for pair in kept]
        result.pairs = pairs_to_record_batch(kept, hashes, stored_kind, self._settings.extra_columns)
        result.keys = to_keys([each.pair for each in hashes])
        result.swapped_keys = to_keys([each.swapped for each in hashes])
        if kind == "labels":
            # the label is part of the key, and the opposite label is what contradicts it
            labels = np.array([example.responses[0].value for example in kept], dtype=np.uint64)
            result.keys, result.swapped_keys = result.keys ^ labels, result.swapped_keys ^ (1 - labels)
            result.desirable = int(labels.sum())
        return result

    def _tokenize(self, task: BlockTask, result: BlockResult) -> list[tuple[TokenizedRow, list[str]]]:
        """Return the tokenized rows, each with the names of its findings."""
        row_format = FORMAT_BY_NAME[task.row_format]
        pairs: list[Example] = []  # of rows that have token ids
        rows: list[PreferenceRow] = []
        texts: list[RenderedRow] = []
        extras: list[dict[str, Any]] = []
        for index, content in enumerate(task.block.contents):
            try:
                values = parse_row(content)
                if row_format.is_tokenized:
                    check_columns(values, row_format, task.column_names)
                    has_weights = row_format.kind == "weighted_pairs"
                    numbers = read_numbers(values)
                    pair = read_tokenized(values, len(self._tokenizer), *numbers, has_token_weights=has_weights)
                    pairs.append(replace(pair, margin=self._margin(values, pair.margin), **self._extra(values)))
                    continue
                row = to_preference_row(values, row_format, task.column_names)
                row = with_system(row, self._settings.system_prompt)
                row = replace(row, margin=self._margin(values, row.margin))
                if (empty := _find_empty(row)) is not None:
                    result.dropped[empty] += 1
                    continue
                extra = self._extra(values)
                texts.append(self._render_row(row))
                rows.append(row)
                extras.append(extra)
            except BadRowError as error:
                result.bad.append(BadRow.of(task.block, index, error))
        result.headers_shortened = sum(each.header_shortened for each in texts)
        tokenized = [(TokenizedRow(pair, False, False), list[str]()) for pair in pairs]
        for row, text, extra, tokens in zip(rows, texts, extras, self._to_tokens(texts), strict=True):
            findings = ["control_tokens_in_text"] * text.has_placeholders
            findings += ["scores_contradict_labels"] * row.scores_contradict
            sides = zip(tokens.example.responses, row.values or (0.0,) * len(row.responses), strict=True)
            responses = tuple(response._replace(value=value) for response, value in sides)
            example = replace(tokens.example, responses=responses, weight=row.weight, margin=row.margin, **extra)
            tokenized.append((replace(tokens, example=example), findings))
        return tokenized

    def _extra(self, row: Row) -> dict[str, Any]:
        """Read the columns that only this data set has."""
        found: dict[str, Any] = {}
        if (key := self._settings.subset_key) is not None:
            found["subset"] = read_subset(row, key)
        if (key := self._settings.order_key) is not None:
            found["order"] = read_order(row, key)
        return found

    def _margin(self, row: Row, margin: float) -> float:
        return score_margin(row, margin) if self._settings.margin_from_scores else margin

    def _render_row(self, row: PreferenceRow) -> RenderedRow:
        spelled = self._control_tokens.find(row)
        if spelled is None:
            return render(row, self._template, self._tokenizer)
        if self._settings.special_tokens_in_text == "reject":
            raise BadRowError(
                f"the text contains the control token {spelled!r}; set "
                f"{self._settings.key('special_tokens_in_text')}=keep_as_text to tokenize it as text"
            )
        return self._control_tokens.render_as_text(row)

    def _keep(self, tokenized: TokenizedRow, kind: Kind, result: BlockResult) -> Example | str:
        """Return the example to keep, or the reason to drop it."""
        full = _distinct(tokenized.example)
        if tokenized.has_empty_response:
            return "empty_response"
        if len(full.prompt_ids) == 0:
            return "empty_prompt"
        if (reason := _find_alike(full, kind)) is not None:
            return reason
        settings = self._settings
        pair = truncate(full, settings.sequence_length, settings.truncation, self._to_tokens.bos_id)
        if pair is None:
            result.too_long.append(needed_length(full, settings.truncation, self._to_tokens.bos_id))
            return "too_long"
        if pair is not full:
            pair = _distinct(pair)
            has_scored_tokens = all(mask is None or mask.any() for _, mask, *_ in pair.responses)
            if _find_alike(pair, kind) is not None or not has_scored_tokens:
                return "nothing_left_after_truncation"
            result.truncated[settings.truncation] += 1
        result.splits_moved += tokenized.split_moved
        result.identical_responses += len(tokenized.example.responses) - len(pair.responses)
        return pair


def _find_empty(row: PreferenceRow) -> str | None:
    """Return the reason to drop a row without text; what the chat template writes around it does not count."""
    for response in row.responses:
        if all(is_empty(message) for message in response if message["role"] == "assistant"):
            return "empty_response"
    # a system message is a prompt only where nothing else is
    asked = [message for message in row.prompt if message["role"] not in SYSTEM_ROLES] or row.prompt
    return "empty_prompt" if all(map(is_empty, asked)) else None


def _json_content(content: Any) -> Any:
    """Return a row's content in a form that JSON can represent."""
    if isinstance(content, bytes):
        return content.decode("utf-8", errors="replace").rstrip("\n")
    if not isinstance(content, Unreadable) and (reason := find_invalid(content)) is not None:
        content = Unreadable.of(reason, content)
    return content.content if isinstance(content, Unreadable) else content


def _distinct(example: Example) -> Example:
    """Drop responses with the tokens of a better one."""
    kept: dict[bytes, Response] = {}
    for response in example.responses:
        kept.setdefault(response.ids.tobytes(), response)
    return example if len(kept) == len(example.responses) else replace(example, responses=tuple(kept.values()))


def _find_alike(example: Example, kind: Kind) -> str | None:
    """Return the reason to drop distinct responses of which none is preferred."""
    if kind == "pairs":
        return "identical_sides" if len(example.responses) < 2 else None
    if kind == "lists" and len(example.responses) < 2:
        return "too_few_responses"
    return "equal_values" if kind == "lists" and example.responses[0].value == example.responses[-1].value else None


@dataclass(frozen=True)
class SourceFormat:
    """Row format of a file, detected from its first row; None if no row can be parsed."""

    source: SourceFile
    format_name: str | None
    unused_columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class SpanTask:
    """A span and the format of its rows."""

    number: int  # among all spans
    file: int  # index among the sources
    span: SourceSpan
    row_format: str
    column_names: Mapping[str, str]
    is_unpaired: bool = False  # its labelled rows are joined to pairs
    skip_blocks: int = 0  # leading blocks that an earlier process has finished


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
        self.files = [_detect_source(source, names, settings.extra_keys) for source in sources]
        spans = [(number, span) for number, source in enumerate(sources) for span in split_source(source)]
        # if no row of a file can be parsed, each is reported as bad whatever the format
        formats = [each.format_name or "prompt" for each in self.files]
        joins = [settings.join_labelled and FORMAT_BY_NAME[each].is_labelled for each in formats]
        self.stored_kind = _kind_of(self.files, settings)
        self.kind = kind_of(self.stored_kind)
        self.spans = [
            SpanTask(number, file, span, formats[file], names, joins[file]) for number, (file, span) in enumerate(spans)
        ]

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


def find_kind(settings: DataSettings, sources: Sequence[SourceFile]) -> StoredKind:
    """Return the kind of examples that the rows of all sources become; reads the first row of each."""
    return _kind_of([_detect_source(each, settings.column_names) for each in sources], settings)


def _kind_of(files: Sequence[SourceFormat], settings: DataSettings) -> StoredKind:
    """Return the kind of all files, or raise `UserError` if they differ."""
    found: dict[StoredKind, str] = {}
    for each in files:
        if each.format_name is not None:
            row_format = FORMAT_BY_NAME[each.format_name]
            joined = settings.join_labelled and row_format.is_labelled
            found.setdefault("pairs" if joined else row_format.kind, each.source.shown)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        join = f"; set {settings.key('join_labelled')}=true to join labelled rows to pairs" if "labels" in found else ""
        shown = {"weighted_pairs": "pairs with token weights", "pairs": "pairs without them"}
        names = [shown.get(each, each) if "weighted_pairs" in found else each for each in (one, other)]
        raise UserError(
            f"{first} has {names[0]}, but {second} has {names[1]}; prepare one kind of rows at a time{join}"
        )
    return next(iter(found), "pairs")


def _detect_source(source: SourceFile, names: Mapping[str, str], extra: Sequence[str] = ()) -> SourceFormat:
    for block in read_blocks(source):
        for index, content in enumerate(block.contents):
            try:
                row = parse_row(content)
            except BadRowError:
                continue
            row_format = detect_format(row, names, block.where(index))
            used = {*row_format.required, *row_format.optional, *names.values(), *extra}
            return SourceFormat(source, row_format.name, tuple(str(name) for name in row if name not in used))
    return SourceFormat(source, None)


class UnpairedJoiner:
    """Joins rows of one answer and a label (KTO style): same prompt and opposite labels become one pair.

    The n-th good answer of a prompt is paired with its n-th bad one in file order. Answers without a partner wait.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[bool, deque[Row]]] = defaultdict(lambda: {True: deque(), False: deque()})
        self.num_waiting = 0

    def join(self, row: Row, row_format: RowFormat) -> Row | None:
        """Return a prompt/chosen/rejected row if an earlier row is a partner; else keep this row and return None."""
        check_columns(row, row_format, {})
        prompt, answer = split_answer(row, row_format.required[0])
        label = read_label(row["label"])
        key = json.dumps([prompt, row.get("system"), row.get("tools")], sort_keys=True, default=str)
        waiting = self._waiting[hashlib.blake2b(key.encode(), digest_size=16).digest()]
        kept = {name: row[name] for name in row_format.optional if row.get(name) is not None}
        current: Row = {**kept, "prompt": prompt, "answer": answer}
        if not waiting[not label]:
            waiting[label].append(current)
            self.num_waiting += 1
            return None
        self.num_waiting -= 1
        partner = waiting[not label].popleft()
        good, bad = (current, partner) if label else (partner, current)
        good["chosen"], good["rejected"] = good.pop("answer"), bad["answer"]
        return good
