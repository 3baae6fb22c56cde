"""Convert one block of rows to a record batch of pairs; a function of the block alone, so any process can run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from thresher.data.pair import Pair
from thresher.data.prepare.findings import Keys, to_keys
from thresher.data.rows.formats import (
    FORMAT_BY_NAME,
    PreferenceRow,
    check_columns,
    read_numbers,
    to_preference_row,
    with_system,
)
from thresher.data.rows.messages import SYSTEM_ROLES, is_empty
from thresher.data.rows.parsing import BadRowError, Unreadable, find_invalid, parse_row
from thresher.data.rows.tokenized import read_tokenized
from thresher.data.settings import DataSettings
from thresher.data.sources.readers import Block
from thresher.data.store.arrow_schema import hash_pair, pairs_to_record_batch
from thresher.data.tokenization.chat_template import RenderedRow, Template, render
from thresher.data.tokenization.control_tokens import ControlTokens
from thresher.data.tokenization.tokenizer import PairTokenizer, TokenizedRow
from thresher.data.tokenization.truncation import needed_length, truncate

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
    """The pairs of a block and the counts of its other rows.

    span, last_number, bytes_done: position of the block, as in `BlockTask` and `Block`.
    bad: rows numbered from the start of the span. findings: indices into the pairs, by name. too_long: for each pair
    dropped as too long, the smallest sequence_length that keeps it.
    """

    span: int
    last_number: int
    bytes_done: int
    rows_read: int
    rows_joined: int = 0
    pairs: Any = None
    keys: Keys = field(default_factory=lambda: np.zeros(0, np.uint64))
    swapped_keys: Keys = field(default_factory=lambda: np.zeros(0, np.uint64))
    bad: list[BadRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    too_long: list[int] = field(default_factory=list)
    truncated: Counter[str] = field(default_factory=Counter)
    splits_moved: int = 0
    headers_shortened: int = 0
    findings: dict[str, list[int]] = field(default_factory=dict)


class BlockWorker:
    """Render, tokenize, truncate and hash the rows of blocks; keeps no state between blocks."""

    def __init__(self, settings: DataSettings, tokenizer: PreTrainedTokenizerBase, template: Template) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._template = template
        self._control_tokens = ControlTokens(tokenizer, template)
        self._to_tokens = PairTokenizer(tokenizer, template, self._control_tokens.placeholders)

    def __call__(self, task: BlockTask) -> BlockResult:
        block = task.block
        result = BlockResult(
            task.span, block.last_number, block.bytes_done, task.rows_read, task.rows_joined, bad=list(task.bad)
        )
        kept: list[Pair] = []
        for tokenized, findings in self._tokenize(task, result):
            pair = self._keep(tokenized, result)
            if isinstance(pair, str):
                result.dropped[pair] += 1
                continue
            for name in findings:
                result.findings.setdefault(name, []).append(len(kept))
            kept.append(pair)
        hashes = [hash_pair(pair) for pair in kept]
        result.pairs = pairs_to_record_batch(kept, hashes)
        result.keys = to_keys([each.pair for each in hashes])
        result.swapped_keys = to_keys([each.swapped for each in hashes])
        return result

    def _tokenize(self, task: BlockTask, result: BlockResult) -> list[tuple[TokenizedRow, list[str]]]:
        """Return the tokenized rows, each with the names of its findings."""
        if FORMAT_BY_NAME[task.row_format].is_tokenized:
            return [(TokenizedRow(pair, False, False), []) for pair in self._read_pairs(task, result)]
        rows, rendered = self._render(task, result)
        result.headers_shortened = sum(each.header_shortened for each in rendered)
        return [
            (
                replace(tokens, pair=replace(tokens.pair, weight=row.weight, margin=row.margin)),
                ["control_tokens_in_text"] * text.has_placeholders
                + ["scores_contradict_labels"] * row.scores_contradict,
            )
            for row, text, tokens in zip(rows, rendered, self._to_tokens(rendered), strict=True)
        ]

    def _read_pairs(self, task: BlockTask, result: BlockResult) -> Iterator[Pair]:
        row_format = FORMAT_BY_NAME[task.row_format]
        for index, content in enumerate(task.block.contents):
            try:
                row = parse_row(content)
                check_columns(row, row_format, task.column_names)
                yield read_tokenized(row, len(self._tokenizer), *read_numbers(row))
            except BadRowError as error:
                result.bad.append(BadRow.of(task.block, index, error))

    def _render(self, task: BlockTask, result: BlockResult) -> tuple[list[PreferenceRow], list[RenderedRow]]:
        row_format = FORMAT_BY_NAME[task.row_format]
        rows: list[PreferenceRow] = []
        texts: list[RenderedRow] = []
        for index, content in enumerate(task.block.contents):
            try:
                row = to_preference_row(parse_row(content), row_format, task.column_names)
                row = with_system(row, self._settings.system_prompt)
                if (empty := _find_empty(row)) is not None:
                    result.dropped[empty] += 1
                    continue
                texts.append(self._render_row(row))
            except BadRowError as error:
                result.bad.append(BadRow.of(task.block, index, error))
                continue
            rows.append(row)
        return rows, texts

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

    def _keep(self, tokenized: TokenizedRow, result: BlockResult) -> Pair | str:
        """Return the pair to keep, or the reason to drop it."""
        full = tokenized.pair
        if tokenized.has_empty_response:
            return "empty_response"
        if len(full.prompt_ids) == 0:
            return "empty_prompt"
        if _is_identical(full):
            return "identical_sides"
        settings = self._settings
        pair = truncate(full, settings.sequence_length, settings.truncation, self._to_tokens.bos_id)
        if pair is None:
            result.too_long.append(needed_length(full, settings.truncation, self._to_tokens.bos_id))
            return "too_long"
        if pair is not full:
            if _is_identical(pair) or not _has_scored_tokens(pair):
                return "nothing_left_after_truncation"
            result.truncated[settings.truncation] += 1
        result.splits_moved += tokenized.split_moved
        return pair


def _find_empty(row: PreferenceRow) -> str | None:
    """Return the reason to drop a row without text; what the chat template writes around it does not count."""
    for side in (row.chosen, row.rejected):
        if all(is_empty(message) for message in side if message["role"] == "assistant"):
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


def _is_identical(pair: Pair) -> bool:
    return np.array_equal(pair.chosen_ids, pair.rejected_ids)


def _has_scored_tokens(pair: Pair) -> bool:
    return all(mask is None or bool(mask.any()) for mask in (pair.chosen_mask, pair.rejected_mask))
