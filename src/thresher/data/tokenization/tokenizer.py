"""Texts become token ids: one BOS at most, one scored EOS at the end, and a prompt that is a prefix of both sides.

The text of a whole side is tokenised at once, as a model reads it. Where the tokenizer merges over the end of the
prompt, the split moves back to the longest prefix that the prompt and both sides share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thresher.data.pair import Pair, TokenIds
from thresher.data.tokenization.chat_template import RenderedRow, SideText, Template, cut_after_eos, eos_token
from thresher.data.tokenization.placeholders import PlaceholderTokenizer
from thresher.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedRow:
    """A pair, and whether its split moved back; an empty response scores no token but EOS."""

    pair: Pair
    split_moved: bool
    has_empty_response: bool


class PairTokenizer:
    """Tokenise rendered rows; a chat template brings its own BOS, plain text gets the tokenizer's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Template, stand_ins: PlaceholderTokenizer) -> None:
        self._eos = eos_token(tokenizer)
        self._stand_ins = stand_ins
        self._tokenizer: Any = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        self._eos_id = int(self._tokenizer.eos_token_id)
        self._opening = _opening_ids(tokenizer) if template.is_raw else []

    def __call__(self, rows: Sequence[RenderedRow]) -> list[TokenizedRow]:
        """Tokenise rows together: one call of the tokenizer for all their texts."""
        plain = iter(self._encode([text for row in rows if not row.has_placeholders for text in self._texts(row)]))
        disarmed = iter(
            self._encode_stand_ins([text for row in rows if row.has_placeholders for text in self._texts(row)])
        )
        result = []
        for row in rows:
            encoded = disarmed if row.has_placeholders else plain
            result.append(self._split(row, next(encoded), next(encoded), next(encoded)))
        return result

    def _texts(self, row: RenderedRow) -> tuple[str, str, str]:
        return row.prompt, self._cut(row, row.chosen), self._cut(row, row.rejected)

    def _cut(self, row: RenderedRow, side: SideText) -> str:
        eos = self._stand_ins.of_token.get(self._eos, self._eos) if row.has_placeholders else self._eos
        return cut_after_eos(side.text, eos)

    def _encode(self, texts: Sequence[str]) -> list[TokenIds]:
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(self._open(ids), dtype=np.int32) for ids in encoded["input_ids"]]

    def _encode_stand_ins(self, texts: Sequence[str]) -> list[TokenIds]:
        encoded = self._stand_ins.encode(texts) if texts else []
        return [np.asarray(self._open(ids), dtype=np.int32) for ids, _ in encoded]

    def _open(self, ids: list[int]) -> list[int]:
        """Put the tokenizer's opening tokens first, once."""
        if self._opening and ids[: len(self._opening)] != self._opening:
            ids = self._opening + ids
        while self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            ids = ids[1:]
        return ids

    def _split(self, row: RenderedRow, prompt: TokenIds, chosen: TokenIds, rejected: TokenIds) -> TokenizedRow:
        split = min(common_prefix(prompt, chosen), common_prefix(prompt, rejected))
        masks = [self._mask(row, side, ids) for side, ids in ((row.chosen, chosen), (row.rejected, rejected))]
        sides = [self._finish(ids, mask, split) for ids, mask in zip((chosen, rejected), masks, strict=True)]
        empty = any(len(ids) < 2 or (mask is not None and not mask[:-1].any()) for ids, mask in sides)
        pair = Pair(prompt[:split], sides[0][0], sides[1][0], sides[0][1], sides[1][1])
        return TokenizedRow(pair, split_moved=split < len(prompt), has_empty_response=empty)

    def _finish(
        self, ids: TokenIds, mask: npt.NDArray[np.bool_] | None, split: int
    ) -> tuple[TokenIds, npt.NDArray[np.bool_] | None]:
        end = len(ids)
        while end > split and ids[end - 1] == self._eos_id:
            end -= 1
        response = np.append(ids[split:end], np.int32(self._eos_id)).astype(np.int32)
        return response, None if mask is None else np.append(mask[split:end], True)

    def _mask(self, row: RenderedRow, side: SideText, ids: TokenIds) -> npt.NDArray[np.bool_] | None:
        if side.scored_spans is None:
            return None
        if not self._tokenizer.is_fast:
            raise UserError(
                "responses of several turns need a fast tokenizer, which knows where its tokens stand in the text"
            )
        starts = np.asarray(self._starts(row, self._cut(row, side)), dtype=np.int64)
        scored = np.zeros(len(starts), dtype=np.bool_)
        for begin, end in side.scored_spans:
            scored |= (starts >= begin) & (starts < end)
        # opening tokens, or a second BOS that was dropped, stand before everything scored
        missing = len(ids) - len(scored)
        return scored[-missing:] if missing < 0 else np.concatenate([np.zeros(missing, dtype=np.bool_), scored])

    def _starts(self, row: RenderedRow, text: str) -> list[int]:
        if row.has_placeholders:
            ((_, starts),) = self._stand_ins.encode([text])
            return starts
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [start for start, _ in encoded["offset_mapping"]]


def _opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what the tokenizer puts before any text, such as BOS; what it puts after is left out."""
    probe: Any = tokenizer
    plain = list(probe("a", add_special_tokens=False)["input_ids"])
    whole = list(probe("a")["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """Count the tokens that two sequences begin with in common."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
