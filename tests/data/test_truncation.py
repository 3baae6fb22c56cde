"""Overlong pairs are dropped by default, and truncated pairs keep a prompt and two responses."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from thresher.data.pair import Pair
from thresher.data.tokenization.tokenizer import needed_length, pair_length, truncate

BOS, EOS = 1, 2


def make_pair(prompt: int, chosen: int, rejected: int, *, bos: bool = True, masked: bool = False) -> Pair:
    """Make a pair whose token ids count up, so that each shows its original position; a response ends with EOS."""
    prompt_ids = np.arange(10, 10 + prompt, dtype=np.int32)
    if bos:
        prompt_ids[0] = BOS
    sides = [np.append(np.arange(100, 100 + length - 1), EOS).astype(np.int32) for length in (chosen, rejected)]
    masks = [np.arange(length) % 3 == 0 if masked else None for length in (chosen, rejected)]
    return Pair(prompt_ids, *sides, *masks)


def test_a_pair_that_fits_is_unchanged() -> None:
    pair = make_pair(4, 3, 6)
    assert pair_length(pair) == 10
    for how in ("drop", "prompt_start", "response_end"):
        assert truncate(pair, 10, how, BOS) is pair  # type: ignore[arg-type]
    assert truncate(make_pair(4, 3, 600), None, "drop", BOS) is not None


def test_drop_drops_an_overlong_pair() -> None:
    assert truncate(make_pair(4, 3, 6), 9, "drop", BOS) is None


def test_prompt_start_removes_the_oldest_tokens_and_keeps_bos() -> None:
    cut = truncate(make_pair(5, 3, 6), 9, "prompt_start", BOS)
    assert cut is not None
    assert cut.prompt_ids.tolist() == [BOS, 13, 14]
    assert (len(cut.chosen_ids), len(cut.rejected_ids)) == (3, 6)


def test_prompt_start_without_bos_keeps_the_newest_tokens() -> None:
    cut = truncate(make_pair(5, 3, 6, bos=False), 9, "prompt_start", BOS)
    assert cut is not None
    assert cut.prompt_ids.tolist() == [12, 13, 14]


def test_prompt_start_drops_a_pair_whose_prompt_would_be_empty() -> None:
    assert truncate(make_pair(5, 3, 6), 8, "prompt_start", BOS) is not None
    assert truncate(make_pair(5, 3, 6), 7, "prompt_start", BOS) is None


def test_a_truncated_response_has_no_eos() -> None:
    cut = truncate(make_pair(4, 3, 6, masked=True), 8, "response_end", BOS)
    assert cut is not None
    assert cut.rejected_ids.tolist() == [100, 101, 102, 103]
    assert cut.chosen_ids.tolist() == [100, 101, EOS]  # it fits, so it keeps its EOS


def test_masks_are_truncated_with_their_responses() -> None:
    cut = truncate(make_pair(4, 5, 6, masked=True), 8, "response_end", BOS)
    assert cut is not None
    assert cut.chosen_mask is not None
    assert cut.rejected_mask is not None
    assert cut.chosen_ids.tolist() == cut.rejected_ids.tolist() == [100, 101, 102, 103]
    assert cut.chosen_mask.tolist() == cut.rejected_mask.tolist() == [True, False, False, True]


def test_response_end_drops_a_pair_without_room_for_a_response() -> None:
    assert truncate(make_pair(6, 3, 6), 6, "response_end", BOS) is None
    cut = truncate(make_pair(6, 3, 6), 7, "response_end", BOS)
    assert cut is not None
    assert (cut.chosen_ids.tolist(), cut.rejected_ids.tolist()) == ([100], [100])


lengths = st.integers(1, 20)
KINDS = ["drop", "prompt_start", "response_end"]


@given(lengths, lengths, lengths, st.sampled_from(KINDS), st.booleans())
def test_the_needed_length_keeps_a_pair_and_one_token_less_does_not(
    prompt: int, chosen: int, rejected: int, how: str, bos: bool
) -> None:
    pair = make_pair(prompt, chosen, rejected, bos=bos)
    needed = needed_length(pair, how, BOS)  # type: ignore[arg-type]
    assert truncate(pair, needed, how, BOS) is not None  # type: ignore[arg-type]
    assert truncate(pair, needed - 1, how, BOS) is None  # type: ignore[arg-type]


@given(lengths, lengths, lengths, st.integers(2, 45), st.sampled_from(["prompt_start", "response_end"]), st.booleans())
def test_every_truncated_pair_fits_and_keeps_a_prompt_and_responses(
    prompt: int, chosen: int, rejected: int, limit: int, how: str, masked: bool
) -> None:
    cut = truncate(make_pair(prompt, chosen, rejected, masked=masked), limit, how, BOS)  # type: ignore[arg-type]
    if cut is not None:
        assert pair_length(cut) <= limit
        assert min(len(cut.prompt_ids), len(cut.chosen_ids), len(cut.rejected_ids)) >= 1
        assert cut.chosen_mask is None or len(cut.chosen_mask) == len(cut.chosen_ids)
        assert cut.rejected_mask is None or len(cut.rejected_mask) == len(cut.rejected_ids)
