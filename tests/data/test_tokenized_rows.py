"""ColossalChat's tokenized rows: token ids and loss masks are used as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.conftest import WriteRows
from tests.support.small_tokenizer import make_tokenizer
from thresher.data.prepare.prepare import prepare
from thresher.data.rows.parsing import BadRowError, read_tokenized
from thresher.data.settings import DataSettings
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError

ROW = {
    "chosen_input_ids": [5, 6, 7, 8, 9],
    "chosen_loss_mask": [0, 0, 1, 1, 1],
    "chosen_label_decode": ["unused"],
    "rejected_input_ids": [5, 6, 10, 11],
    "rejected_loss_mask": [0, 0, 1, 1],
    "rejected_label_decode": ["unused"],
}


def read(**changes: Any) -> Any:
    return read_tokenized({**ROW, **changes}, 100, 1.0, 0.0)


def test_the_prompt_precedes_the_first_scored_token() -> None:
    pair = read()
    assert (pair.prompt_ids.tolist(), pair.chosen.ids.tolist(), pair.rejected.ids.tolist()) == (
        [5, 6],
        [7, 8, 9],
        [10, 11],
    )
    assert pair.chosen.mask is pair.rejected.mask is None
    assert pair.chosen.ids.dtype == np.int32


def test_tokens_after_the_last_scored_one_are_removed() -> None:
    """Padding, and what a template writes after the answer, change no logp of a causal model."""
    padded = read(chosen_input_ids=[5, 6, 7, 8, 9, 0, 0], chosen_loss_mask=[0, 0, 1, 1, 1, 0, 0])
    assert padded.chosen.ids.tolist() == [7, 8, 9]


def test_tokens_that_are_not_attended_to_are_removed() -> None:
    left = {
        "chosen_input_ids": [0, 0, 5, 6, 7],
        "chosen_loss_mask": [0, 0, 0, 0, 1],
        "chosen_attention_mask": [0, 0, 1, 1, 1],
    }
    pair = read(**left)
    assert (pair.prompt_ids.tolist(), pair.chosen.ids.tolist()) == ([5, 6], [7])


def test_a_gap_in_the_loss_mask_is_kept_as_a_mask() -> None:
    pair = read(chosen_loss_mask=[0, 0, 1, 0, 1])
    assert pair.chosen.mask.tolist() == [True, False, True]


def test_the_first_token_is_not_scored_because_nothing_predicts_it() -> None:
    """As in ColossalChat, whose loss uses the mask from the second token on."""
    pair = read(chosen_loss_mask=[1] * 5, rejected_loss_mask=[1] * 4)
    assert (pair.prompt_ids.tolist(), pair.chosen.ids.tolist()) == ([5], [6, 7, 8, 9])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chosen_loss_mask": [0, 1, 1, 1, 1]}, "differ between the sides (1 and 2 tokens)"),
        ({"rejected_input_ids": [5, 4, 10, 11]}, "the tokens before the first scored token differ"),
        ({"chosen_loss_mask": [0, 0, 1]}, "`chosen_input_ids` has 5 tokens, but `chosen_loss_mask` has 3 values"),
        ({"chosen_loss_mask": [1, 0, 0, 0, 0]}, "`chosen_loss_mask` scores no token after the first"),
        ({"rejected_input_ids": []}, "has 0 tokens, but `rejected_loss_mask` has 4"),
        ({"chosen_input_ids": "5 6"}, "`chosen_input_ids` must be a list of numbers"),
        ({"chosen_input_ids": [5, 6, 7.5, 8, 9]}, "`chosen_input_ids` must have integers only"),
        ({"chosen_input_ids": [5, 6, 2**40, 8, 9]}, "`chosen_input_ids` must have integers only"),
        ({"chosen_input_ids": [5, 6, 100, 8, 9]}, "the token id 100, but the tokenizer has 100 tokens"),
        ({"chosen_input_ids": [5, 6, -1, 8, 9]}, "the token id -1, but the tokenizer has 100 tokens"),
        ({"chosen_attention_mask": [1]}, "`chosen_attention_mask` has 1 values for 5 tokens"),
    ],
)
def test_a_row_that_is_not_a_prompt_with_two_responses_is_bad(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRowError) as caught:
        read(**changes)
    assert reason in str(caught.value)


def test_a_directory_of_arrow_parts_and_json_lines_give_the_same_pairs(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
) -> None:
    """ColossalChat writes part-00000, part-00001, ... with `save_to_disk`, and the same rows as JSON lines."""
    rows = [{**ROW, "chosen_input_ids": [5, 6, 7, 8, 20 + number], "margin": number} for number in range(5)]
    for number, part in enumerate((rows[:3], rows[3:])):
        datasets.Dataset.from_list(part).save_to_disk(str(tmp_path / "arrow" / f"part-{number:05d}"))
    stores = []
    for name, source in (("a", str(tmp_path / "arrow")), ("b", write_rows(*rows))):
        report = prepare(DataSettings(source, template="raw"), chat_tokenizer, tmp_path / name)
        assert (report.rows_read, report.pairs_kept) == (5, 5)
        stores.append(ExampleStore.open(tmp_path / name))
    assert stores[0].digest == stores[1].digest
    assert [int(stores[0][number].chosen.ids[-1]) for number in range(5)] == [20, 21, 22, 23, 24]
    assert [stores[0][number].margin for number in range(5)] == [0, 1, 2, 3, 4]
    unread = {name for file in report.files for name in file.unused_columns}
    assert unread == {"chosen_label_decode", "rejected_label_decode"}


def test_rows_of_token_ids_need_no_chat_template(tmp_path: Path, write_rows: WriteRows) -> None:
    tokenizer, source = make_tokenizer(), write_rows(ROW)
    assert tokenizer.chat_template is None
    for name, template in (("auto", "auto"), ("raw", "raw")):
        prepare(DataSettings(source, template=template), tokenizer, tmp_path / name)
    assert ExampleStore.open(tmp_path / "auto").digest == ExampleStore.open(tmp_path / "raw").digest
    text = write_rows({"prompt": "Why?", "chosen": "yes", "rejected": "no"}, name="text.jsonl")
    with pytest.raises(UserError, match=r"the tokenizer has no chat template; use actor_train.data_args.template=raw"):
        prepare(DataSettings([source, text]), tokenizer, tmp_path / "both")


def test_an_id_beyond_the_vocabulary_stops_the_preparation(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
) -> None:
    size = len(chat_tokenizer)
    source = write_rows({**ROW, "rejected_input_ids": [5, 6, size, 11]})
    with pytest.raises(UserError, match=f"the token id {size}, but the tokenizer has {size} tokens"):
        prepare(DataSettings(source, template="raw"), chat_tokenizer, tmp_path / "store")


def test_long_rows_are_truncated_and_empty_values_are_bad(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
) -> None:
    source = write_rows(ROW, {**ROW, "chosen_input_ids": None})
    settings = DataSettings(source, template="raw", sequence_length=4, truncation="response_end", on_bad_row="skip")
    report = prepare(settings, chat_tokenizer, tmp_path / "store")
    assert (report.pairs_kept, report.truncated) == (1, {"response_end": 1})
    assert ExampleStore.open(tmp_path / "store")[0].chosen.ids.tolist() == [7, 8]
