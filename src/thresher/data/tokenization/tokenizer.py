"""Tokenize rendered rows: at most one BOS, one scored EOS at the end, and a prompt that is a prefix of both sides.

Prompt and response are tokenized as one text, as a model reads them. Where the tokenizer merges across the end of the
prompt, the split moves back to the longest common prefix of the prompt and both sides. Pairs longer than
`sequence_length` are dropped or truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thresher.data.pair import Pair, TokenIds
from thresher.data.settings import Truncation
from thresher.data.tokenization.chat_template import RenderedRow, SideText, Template, cut_after_eos, eos_token
from thresher.data.tokenization.control_tokens import PlaceholderTokenizer
from thresher.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedRow:
    """A pair, and whether its split moved back; an empty response has no scored token except EOS."""

    pair: Pair
    split_moved: bool
    has_empty_response: bool


class PairTokenizer:
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
        return [self._split(row, *islice(escaped if row.has_placeholders else ordinary, 3)) for row in rows]

    def _encode(self, rows: Sequence[RenderedRow], *, has_placeholders: bool) -> list[TokenIds]:
        texts = [
            text for row in rows for text in (row.prompt, self._cut(row, row.chosen), self._cut(row, row.rejected))
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

    def _split(self, row: RenderedRow, prompt: TokenIds, chosen: TokenIds, rejected: TokenIds) -> TokenizedRow:
        split = min(_common_prefix_length(prompt, chosen), _common_prefix_length(prompt, rejected))
        sides = self._response(row, row.chosen, chosen, split), self._response(row, row.rejected, rejected, split)
        empty = any(len(ids) < 2 or (mask is not None and not mask[:-1].any()) for ids, mask in sides)
        pair = Pair(prompt[:split], sides[0][0], sides[1][0], sides[0][1], sides[1][1])
        return TokenizedRow(pair, split_moved=split < len(prompt), has_empty_response=empty)

    def _response(
        self, row: RenderedRow, side: SideText, ids: TokenIds, split: int
    ) -> tuple[TokenIds, npt.NDArray[np.bool_] | None]:
        mask, end = self._mask(row, side, ids), len(ids)
        while end > split and ids[end - 1] == self._eos_id:
            end -= 1
        response = np.append(ids[split:end], np.int32(self._eos_id)).astype(np.int32)
        return response, None if mask is None else np.append(mask[split:end], True)

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


def pair_length(pair: Pair) -> int:
    """Return the number of tokens of the longer of a pair's two sequences."""
    return len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))


def truncate(pair: Pair, limit: int | None, how: Truncation, bos_id: int | None) -> Pair | None:
    """Return a pair within the limit, the same object if it fits, or None to drop it.

    A truncated response has no EOS. A truncated prompt keeps its BOS and at least one other token.
    """
    if limit is None or pair_length(pair) <= limit:
        return pair
    kept, excess = _num_kept_tokens(pair, bos_id), pair_length(pair) - limit
    if how == "prompt_start" and kept + excess < len(pair.prompt_ids):
        return replace(pair, prompt_ids=np.concatenate([pair.prompt_ids[:kept], pair.prompt_ids[kept + excess :]]))
    room = limit - len(pair.prompt_ids)
    if how == "response_end" and room >= 1:
        return replace(
            pair,
            chosen_ids=pair.chosen_ids[:room],
            rejected_ids=pair.rejected_ids[:room],
            chosen_mask=None if pair.chosen_mask is None else pair.chosen_mask[:room],
            rejected_mask=None if pair.rejected_mask is None else pair.rejected_mask[:room],
        )
    return None


def needed_length(pair: Pair, how: Truncation, bos_id: int | None) -> int:
    """Return the smallest limit at which a pair is kept, truncated or not."""
    response = max(len(pair.chosen_ids), len(pair.rejected_ids))
    needed = {"prompt_start": _num_kept_tokens(pair, bos_id) + 1 + response, "response_end": len(pair.prompt_ids) + 1}
    return min(pair_length(pair), needed.get(how, pair_length(pair)))


def _num_kept_tokens(pair: Pair, bos_id: int | None) -> int:
    """Return the number of tokens at the start of a prompt that are never cut: its BOS."""
    return int(len(pair.prompt_ids) > 0 and bos_id is not None and pair.prompt_ids[0] == bos_id)
