"""The padded layout, by hand: two pairs, every number written out."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.tiny_models import batch_of
from thresher.data.pair import Pair
from thresher.errors import UserError
from thresher.models.layouts import PaddedLayout


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


SHORT = Pair(ids(10), ids(20, 21), ids(30))
LONG = Pair(ids(11, 12, 13), ids(22, 23), ids(31, 32, 33), np.array([False, True]), np.array([True, False, True]))


@pytest.fixture(scope="module")
def arranged():
    return PaddedLayout(pad_id=9).collate(batch_of(SHORT, LONG))


def test_rows_are_all_chosen_sides_then_all_rejected_ones_padded_on_the_right(arranged):
    assert arranged.model_inputs["input_ids"].tolist() == [
        [10, 20, 21, 9, 9, 9],
        [11, 12, 13, 22, 23, 9],
        [10, 30, 9, 9, 9, 9],
        [11, 12, 13, 31, 32, 33],
    ]
    assert arranged.model_inputs["attention_mask"].tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
    ]
    assert arranged.model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 4


def test_a_token_is_predicted_by_the_row_before_it_and_masked_tokens_by_none(arranged):
    # 20 and 21 at places 1 and 2 of row 0; 23 at place 4 of row 1; 30 at place 1 of row 2; 31 and 33 of row 3
    assert arranged.scored_rows.tolist() == [0, 1, 6 + 3, 12 + 0, 18 + 2, 18 + 4]
    assert arranged.targets.tolist() == [20, 21, 23, 30, 31, 33]
    assert arranged.chosen_lengths.tolist() == [2, 1]
    assert arranged.rejected_lengths.tolist() == [1, 2]


def test_useful_and_padding_tokens_add_up_to_the_batch(arranged):
    assert (arranged.num_useful_tokens, arranged.num_padding_tokens) == (16, 8)
    assert arranged.num_shared_tokens == 0


def test_padding_goes_to_the_longest_of_the_batch_not_to_a_fixed_length():
    assert PaddedLayout(pad_id=9).collate(batch_of(SHORT)).model_inputs["input_ids"].shape == (2, 3)


def test_a_response_without_a_scored_token_has_length_zero():
    silent = Pair(ids(10), ids(20), ids(30), np.array([False]), np.array([True]))
    arranged = PaddedLayout(pad_id=9).collate(batch_of(silent, SHORT))
    assert arranged.chosen_lengths.tolist() == [0, 2]
    assert arranged.targets.tolist() == [20, 21, 30, 30]


def test_an_empty_prompt_is_refused_by_the_number_of_its_pair():
    with pytest.raises(UserError, match="pair 1 has an empty prompt, so nothing predicts its first token"):
        PaddedLayout(pad_id=9).collate(batch_of(SHORT, Pair(ids(), ids(20), ids(30))))
