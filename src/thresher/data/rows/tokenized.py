"""Rows of token ids with loss masks, as ColossalChat's `prepare_dataset.py` writes them: no template, no tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.data.pair import Pair, TokenIds
from thresher.data.rows.parsing import BadRowError, Row

Mask = npt.NDArray[np.bool_]


def read_tokenized(row: Row, vocab_size: int, weight: float, margin: float) -> Pair:
    """Read a pair, or raise `BadRowError`.

    The prompt is what precedes the first scored token, and must be the same on both sides. Tokens after the last scored
    token, such as padding, change no logp and are removed. Nothing predicts the first token, so its mask is ignored.
    """
    (prompt, chosen, chosen_mask), (other, rejected, rejected_mask) = (
        _read_side(row, side, vocab_size) for side in ("chosen", "rejected")
    )
    if not np.array_equal(prompt, other):
        raise BadRowError(
            f"the tokens before the first scored token differ between the sides ({len(prompt)} and {len(other)} tokens)"
        )
    return Pair(prompt, chosen, rejected, chosen_mask, rejected_mask, weight, margin)


def _read_side(row: Row, side: str, vocab_size: int) -> tuple[TokenIds, TokenIds, Mask | None]:
    """Split a sequence into prompt and response, with the mask of the response; None scores all its tokens."""
    ids = _integers(row, f"{side}_input_ids")
    mask = _integers(row, f"{side}_loss_mask").astype(np.bool_)
    if len(ids) != len(mask):
        raise BadRowError(f"`{side}_input_ids` has {len(ids)} tokens, but `{side}_loss_mask` has {len(mask)} values")
    if row.get(f"{side}_attention_mask") is not None:
        attended = _integers(row, f"{side}_attention_mask").astype(np.bool_)
        if len(attended) != len(ids):
            raise BadRowError(f"`{side}_attention_mask` has {len(attended)} values for {len(ids)} tokens")
        ids, mask = ids[attended], mask[attended]
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        outside = next(int(each) for each in ids if not 0 <= each < vocab_size)
        raise BadRowError(
            f"`{side}_input_ids` contains the token id {outside}, but the tokenizer has {vocab_size} tokens; use the "
            "tokenizer that the rows were made with"
        )
    scored = np.flatnonzero(mask[1:]) + 1
    if not len(scored):
        raise BadRowError(f"`{side}_loss_mask` scores no token after the first")
    first, end = int(scored[0]), int(scored[-1]) + 1
    response = mask[first:end]
    return ids[:first].astype(np.int32), ids[first:end].astype(np.int32), None if response.all() else response


def _integers(row: Row, name: str) -> npt.NDArray[np.int64]:
    value: Any = row[name]
    if not isinstance(value, list) or not all(isinstance(each, int | float) for each in value):
        raise BadRowError(f"`{name}` must be a list of numbers")
    numbers = np.asarray(value, dtype=np.float64)
    if not np.array_equal(numbers, np.trunc(numbers)) or np.abs(numbers).max(initial=0) > 2**31 - 1:
        raise BadRowError(f"`{name}` must have integers only")
    return numbers.astype(np.int64)
