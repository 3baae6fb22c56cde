"""Truncate or drop pairs longer than `sequence_length`; the default, `drop`, truncates nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from thresher.data.pair import Pair
from thresher.data.settings import Truncation


def pair_length(pair: Pair) -> int:
    """Return the number of tokens of the longer of a pair's two sequences."""
    return len(pair.prompt_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))


def truncate(pair: Pair, limit: int | None, how: Truncation, bos_id: int | None) -> Pair | None:
    """Return a pair within the limit, the same object if it fits, or None to drop it.

    A truncated response has no EOS. A truncated prompt keeps its BOS and at least one other token.
    """
    if limit is None or pair_length(pair) <= limit:
        return pair
    if how == "prompt_start":
        return _cut_prompt_start(pair, limit, bos_id)
    if how == "response_end":
        return _cut_response_end(pair, limit)
    return None


def needed_length(pair: Pair, how: Truncation, bos_id: int | None) -> int:
    """Return the smallest limit at which a pair is kept, truncated or not."""
    response = max(len(pair.chosen_ids), len(pair.rejected_ids))
    needed = {"prompt_start": _num_kept_tokens(pair, bos_id) + 1 + response, "response_end": len(pair.prompt_ids) + 1}
    return min(pair_length(pair), needed.get(how, pair_length(pair)))


def _num_kept_tokens(pair: Pair, bos_id: int | None) -> int:
    """Return the number of tokens at the start of a prompt that are never cut: its BOS."""
    return int(len(pair.prompt_ids) > 0 and bos_id is not None and pair.prompt_ids[0] == bos_id)


def _cut_prompt_start(pair: Pair, limit: int, bos_id: int | None) -> Pair | None:
    excess = pair_length(pair) - limit
    kept = _num_kept_tokens(pair, bos_id)
    if kept + excess >= len(pair.prompt_ids):
        return None
    return replace(pair, prompt_ids=np.concatenate([pair.prompt_ids[:kept], pair.prompt_ids[kept + excess :]]))


def _cut_response_end(pair: Pair, limit: int) -> Pair | None:
    room = limit - len(pair.prompt_ids)
    if room < 1:
        return None
    return replace(
        pair,
        chosen_ids=pair.chosen_ids[:room],
        rejected_ids=pair.rejected_ids[:room],
        chosen_mask=None if pair.chosen_mask is None else pair.chosen_mask[:room],
        rejected_mask=None if pair.rejected_mask is None else pair.rejected_mask[:room],
    )
