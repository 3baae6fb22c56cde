"""Tokenize rendered rows: no repeated BOS, one scored EOS at the end, and a prompt that is a prefix of all responses.

Prompt and response are tokenized as one text, as a model reads them. Where the tokenizer merges across the end of the
prompt, the split moves back to the longest common prefix of the prompt and all responses. Examples longer than
`sequence_length` are dropped or truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thresher.data.example import Example, Response, TokenIds
from thresher.data.settings import Truncation
from thresher.data.tokenization.chat_template import RenderedRow, SideText, Template, cut_after_eos, eos_token
from thresher.data.tokenization.control_tokens import PlaceholderTokenizer
from thresher.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedRow:
    """An example, and whether its split moved back; an empty response has no scored token except EOS."""

    example: Example
    split_moved: bool
    has_empty_response: bool


class RowTokenizer:
    """Tokenizes rendered rows; a chat template writes its BOS itself, raw text gets the tokenizer's prefix."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: Template, placeholders: PlaceholderTokenizer
    ) -> None:
        self._eos = eos_token(tokenizer)
        self._placeholders = placeholders
        self._tokenizer: Any = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        self._eos_id = int(self._tokenizer.eos_token_id)
        self._prefix_ids = _prefix_ids(tokenizer) if template.is_raw else []

    def __call__(self, rows: Sequence[RenderedRow]) -> list[TokenizedRow]:
        """Tokenize rows, with one tokenizer call for all their texts."""
        ordinary = iter(self._encode([row for row in rows if not row.has_placeholders], has_placeholders=False))
        escaped = iter(self._encode([row for row in rows if row.has_placeholders], has_placeholders=True))
        return [
            self._split(row, *islice(escaped if row.has_placeholders else ordinary, 1 + len(row.responses)))
            for row in rows
        ]

    def _encode(self, rows: Sequence[RenderedRow], *, has_placeholders: bool) -> list[TokenIds]:
        texts = [
            text for row in rows for text in (row.prompt, *(self._cut(row, response) for response in row.responses))
        ]
        if not texts:
            return []
        if has_placeholders:
            encoded = [ids for ids, _ in self._placeholders.encode(texts)]
        else:
            encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
                "input_ids"
            ]
        return [np.asarray(self._with_prefix(ids), dtype=np.int32) for ids in encoded]

    def _cut(self, row: RenderedRow, side: SideText) -> str:
        eos = self._placeholders.by_token.get(self._eos, self._eos) if row.has_placeholders else self._eos
        return cut_after_eos(side.text, eos)

    def _with_prefix(self, ids: list[int]) -> list[int]:
        """Prepend the tokenizer's prefix unless the text already has it, and remove a repeated BOS."""
        if self._prefix_ids and ids[: len(self._prefix_ids)] != self._prefix_ids:
            ids = self._prefix_ids + ids
        while self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            ids = ids[1:]
        return ids

    def _split(self, row: RenderedRow, prompt: TokenIds, *texts: TokenIds) -> TokenizedRow:
        split = min(_common_prefix_length(prompt, ids) for ids in texts)
        sides = zip(row.responses, texts, strict=True)
        responses = tuple(self._response(row, side, ids, split) for side, ids in sides)
        empty = any(len(ids) < 2 or (mask is not None and not mask[:-1].any()) for ids, mask, *_ in responses)
        example = Example(prompt[:split], responses)
        return TokenizedRow(example, split_moved=split < len(prompt), has_empty_response=empty)

    def _response(self, row: RenderedRow, side: SideText, ids: TokenIds, split: int) -> Response:
        mask, end = self._mask(row, side, ids), len(ids)
        while end > split and ids[end - 1] == self._eos_id:
            end -= 1
        response = np.append(ids[split:end], np.int32(self._eos_id)).astype(np.int32)
        return Response(response, None if mask is None else np.append(mask[split:end], True))

    def _mask(self, row: RenderedRow, side: SideText, ids: TokenIds) -> npt.NDArray[np.bool_] | None:
        if side.scored_spans is None:
            return None
        if not self._tokenizer.is_fast:
            raise UserError(
                "the tokenizer is slow, but responses of several turns need token offsets; use a fast tokenizer"
            )
        text = self._cut(row, side)
        if row.has_placeholders:
            ((_, offsets),) = self._placeholders.encode([text])
        else:
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            offsets = encoded["offset_mapping"]
        starts, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
        scored = np.zeros(len(offsets), dtype=np.bool_)
        for begin, end in side.scored_spans:
            # a token that merges the header's last space with the turn's first word is scored, as in a single turn
            scored |= ((starts >= begin) | (ends > begin)) & (starts < end)
        # a prefix that was added, or a repeated BOS that was removed, precedes all scored tokens
        missing = len(ids) - len(scored)
        return scored[-missing:] if missing < 0 else np.concatenate([np.zeros(missing, dtype=np.bool_), scored])


def _prefix_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before any text, such as BOS, without those after it."""
    text = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(text) + 1):
        if full[start : start + len(text)] == text:
            return full[:start]
    return []


def _common_prefix_length(left: TokenIds, right: TokenIds) -> int:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def longest_response(example: Example) -> int:
    return max(len(response.ids) for response in example.responses)


def example_length(example: Example) -> int:
    """Return the number of tokens of the prompt and the longest response."""
    return len(example.prompt_ids) + longest_response(example)


def truncate(example: Example, limit: int | None, how: Truncation, bos_id: int | None) -> Example | None:
    """Return an example within the limit, the same object if it fits, or None to drop it.

    A truncated response has no EOS. A truncated prompt keeps its BOS and at least one other token.
    """
    if limit is None or example_length(example) <= limit:
        return example
    prompt = example.prompt_ids
    kept, excess = _num_kept_tokens(example, bos_id), example_length(example) - limit
    if how == "prompt_start" and kept + excess < len(prompt):
        return replace(example, prompt_ids=np.concatenate([prompt[:kept], prompt[kept + excess :]]))
    room = limit - len(prompt)
    if how == "response_end" and room >= 1:
        return replace(example, responses=tuple(response.first_tokens(room) for response in example.responses))
    return None


def needed_length(example: Example, how: Truncation, bos_id: int | None) -> int:
    """Return the smallest limit at which an example is kept, truncated or not."""
    start, full = _num_kept_tokens(example, bos_id), example_length(example)
    needed = {"prompt_start": start + 1 + longest_response(example), "response_end": len(example.prompt_ids) + 1}
    return min(full, needed.get(how, full))


def _num_kept_tokens(example: Example, bos_id: int | None) -> int:
    """Return the number of tokens at the start of a prompt that are never cut: its BOS."""
    return int(len(example.prompt_ids) > 0 and bos_id is not None and example.prompt_ids[0] == bos_id)
