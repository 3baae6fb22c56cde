"""One block of rows to pairs in the store's columns: the work of one process, a function of the block alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from thresher.data.pair import Pair
from thresher.data.prepare.findings import Keys, to_keys
from thresher.data.rows.formats import FORMAT_BY_NAME, PreferenceRow, to_preference_row
from thresher.data.rows.messages import has_content
from thresher.data.rows.parsing import BadRowError, Unreadable, find_invalid, parse_row
from thresher.data.settings import DataSettings
from thresher.data.sources.readers import Block
from thresher.data.store.arrow_schema import hash_pair, pairs_to_record_batch
from thresher.data.tokenization.chat_template import RenderedRow, Template, render
from thresher.data.tokenization.control_tokens import ControlTokens
from thresher.data.tokenization.tokenizer import PairTokenizer, TokenizedRow
from thresher.data.tokenization.truncation import truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class BadRow:
    """A row that could not become a pair, and why."""

    file: str
    unit: str
    number: int
    reason: str
    content: Any

    @classmethod
    def of(cls, block: Block, index: int, error: BadRowError) -> BadRow:
        return cls(block.file, block.unit, block.numbers[index], str(error), _writable(block.contents[index]))


@dataclass(frozen=True)
class BlockTask:
    """A block of a span and how its file is to be read; bad rows and rows joined were found before it was sent."""

    span: int
    block: Block
    shape: str
    column_names: Mapping[str, str]
    rows_read: int
    rows_joined: int = 0
    bad: tuple[BadRow, ...] = ()


@dataclass
class BlockResult:
    """The pairs of a block and what became of its other rows; numbers of bad rows count from the span's start.

    span, last_number, bytes_done: where the block stands, as in `BlockTask` and `Block`.
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
    truncated: Counter[str] = field(default_factory=Counter)
    splits_moved: int = 0
    headers_shortened: int = 0
    control_tokens: list[int] = field(default_factory=list)  # positions among the kept pairs


class BlockWorker:
    """Turn blocks into pairs with one tokenizer; holds nothing of a block afterwards."""

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
        rows, rendered = self._render(task, result)
        kept: list[Pair] = []
        for row, text, tokenized in zip(rows, rendered, self._to_tokens(rendered), strict=True):
            pair = self._keep(row, tokenized, result)
            if isinstance(pair, str):
                result.dropped[pair] += 1
                continue
            if text.has_placeholders:
                result.control_tokens.append(len(kept))
            kept.append(pair)
        hashes = [hash_pair(pair) for pair in kept]
        result.pairs = pairs_to_record_batch(kept, hashes)
        result.keys = to_keys([each.pair for each in hashes])
        result.swapped_keys = to_keys([each.swapped for each in hashes])
        result.headers_shortened = sum(each.header_shortened for each in rendered)
        return result

    def _render(self, task: BlockTask, result: BlockResult) -> tuple[list[PreferenceRow], list[RenderedRow]]:
        shape = FORMAT_BY_NAME[task.shape]
        rows: list[PreferenceRow] = []
        texts: list[RenderedRow] = []
        for index, content in enumerate(task.block.contents):
            try:
                row = to_preference_row(parse_row(content), shape, task.column_names)
                if not (has_content(row.chosen) and has_content(row.rejected)):
                    result.dropped["empty_response"] += 1
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
                f"the text spells the control token {spelled!r}; set data_args.special_tokens_in_text=keep_as_text to "
                "tokenize it as text"
            )
        return self._control_tokens.render_as_text(row)

    def _keep(self, row: PreferenceRow, tokenized: TokenizedRow, result: BlockResult) -> Pair | str:
        """Return the pair to keep, or the cause for which it is dropped."""
        whole = tokenized.pair
        if tokenized.has_empty_response:
            return "empty_response"
        if len(whole.prompt_ids) == 0:
            return "empty_prompt"
        if _is_identical(whole):
            return "identical_sides"
        settings = self._settings
        pair = truncate(whole, settings.sequence_length, settings.truncation, self._to_tokens.bos_id)
        if pair is None:
            return "too_long"
        if pair is not whole:
            if _is_identical(pair) or not _has_scored_tokens(pair):
                return "nothing_left_after_truncation"
            result.truncated[settings.truncation] += 1
        result.splits_moved += tokenized.split_moved
        return replace(pair, weight=row.weight, margin=row.margin)


def _writable(content: Any) -> Any:
    """Return a row's content in a form that JSON can hold."""
    if isinstance(content, bytes):
        return content.decode("utf-8", errors="replace").rstrip("\n")
    if not isinstance(content, Unreadable) and (wrong := find_invalid(content)) is not None:
        content = Unreadable.of(wrong, content)
    return content.content if isinstance(content, Unreadable) else content


def _is_identical(pair: Pair) -> bool:
    return np.array_equal(pair.chosen_ids, pair.rejected_ids)


def _has_scored_tokens(pair: Pair) -> bool:
    return all(mask is None or bool(mask.any()) for mask in (pair.chosen_mask, pair.rejected_mask))
