"""The padded layout of two small pairs, with every value written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.tiny_models import batch_of, pair_of, tiny_model
from thresher.data.example import Example
from thresher.errors import UserError
from thresher.models.layouts import PaddedLayout
from thresher.models.logps import PairModel


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


SHORT = Example.pair(ids(10), ids(20, 21), ids(30))
LONG = Example.pair(
    ids(11, 12, 13), ids(22, 23), ids(31, 32, 33), np.array([False, True]), np.array([True, False, True])
)


@pytest.fixture(scope="module")
def inputs():
    return PaddedLayout(pad_id=9).collate(batch_of(SHORT, LONG))


def test_rows_are_all_chosen_then_all_rejected_sides_right_padded(inputs):
    assert inputs.model_inputs["input_ids"].tolist() == [
        [10, 20, 21, 9, 9, 9],
        [11, 12, 13, 22, 23, 9],
        [10, 30, 9, 9, 9, 9],
        [11, 12, 13, 31, 32, 33],
    ]
    assert inputs.model_inputs["attention_mask"].tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
    ]
    assert inputs.model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 4


def test_a_token_is_predicted_by_the_previous_position_and_masked_tokens_are_not_scored(inputs):
    # 20 and 21 at columns 1 and 2 of row 0; 23 at column 4 of row 1; 30 at column 1 of row 2; 31 and 33 of row 3
    assert inputs.scored_rows.tolist() == [0, 1, 6 + 3, 12 + 0, 18 + 2, 18 + 4]
    assert inputs.targets.tolist() == [20, 21, 23, 30, 31, 33]
    assert [lengths.tolist() for lengths in inputs.side_lengths] == [[2, 1], [1, 2]]


def test_useful_and_padding_tokens_add_up_to_the_batch(inputs):
    assert (inputs.num_useful_tokens, inputs.num_padding_tokens) == (16, 8)
    assert inputs.num_shared_tokens == 0


def test_rows_are_padded_to_the_longest_of_the_batch():
    assert PaddedLayout(pad_id=9).collate(batch_of(SHORT)).model_inputs["input_ids"].shape == (2, 3)


def test_a_response_without_a_scored_token_has_length_zero():
    unscored = Example.pair(ids(10), ids(20), ids(30), np.array([False]), np.array([True]))
    inputs = PaddedLayout(pad_id=9).collate(batch_of(unscored, SHORT))
    assert inputs.side_lengths[0].tolist() == [0, 2]
    assert inputs.targets.tolist() == [20, 21, 30, 30]


def test_an_empty_prompt_is_rejected_with_its_pair_id():
    with pytest.raises(UserError, match="pair 1 has an empty prompt, so nothing predicts its first token"):
        PaddedLayout(pad_id=9).collate(batch_of(SHORT, Example.pair(ids(), ids(20), ids(30))))


def test_the_pad_token_changes_no_logp_and_is_never_scored():
    """EOS, 2, is a token of the responses; as padding it is masked."""
    model = tiny_model("llama")
    pairs = batch_of(pair_of(2, 3, 9, seed=1), Example.pair(ids(5, 6, 7), ids(8, 2), ids(9, 10, 11, 2)))
    scored = []
    for pad_id in (0, 2, 30):
        layout = PaddedLayout(pad_id)
        sides = PairModel.for_layout(model, torch.float32, layout).score(layout.collate(pairs))
        assert sides.chosen.lengths.tolist() == [3, 2]
        assert sides.rejected.lengths.tolist() == [9, 4]
        scored.append(torch.cat([sides.chosen.values, sides.rejected.values]))
    for other in scored[1:]:
        torch.testing.assert_close(other, scored[0], atol=0, rtol=0)
