"""ColossalChat's tokenized rows: token ids and loss masks are used as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.data.conftest import WriteRows
from tests.support.small_tokenizer import make_tokenizer
from thresher.cli import app
from thresher.data.example import ExampleBatch
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


WEIGHTED = {
    **ROW,
    "chosen_loss_mask": [0, 0, 1, 0, 1],
    "chosen_token_weights": [9, 9, 0.5, 3, 2],
    "rejected_token_weights": [9, 9, 0, 1],
}


def test_weights_of_tokens_are_those_of_the_response_alone() -> None:
    attended = {"chosen_attention_mask": [0, 1, 1, 1, 1], "rejected_attention_mask": [0, 1, 1, 1]}
    pair = read_tokenized({**WEIGHTED, **attended}, 100, 1.0, 0.0, has_token_weights=True)
    assert [response.weights.tolist() for response in pair.responses] == [[0.5, 3, 2], [0, 1]]
    batch = ExampleBatch(np.arange(2), (pair, read()))
    assert batch.token_weights(0).tolist() == [0.5, 2, 1, 1, 1]  # of scored tokens; 1 for a pair without weights
    assert ExampleBatch(np.arange(1), (read(),)).token_weights(0) is None


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([1, 1, 1], "`chosen_input_ids` has 5 tokens, but `chosen_token_weights` has 3 values"),
        ([1, 1, 1, 1, -0.5], "`chosen_token_weights` must have finite numbers that are not negative"),
        ([1, 1, 1, 1, float("nan")], "must have finite numbers"),
        ([1, 1, 1, 1, 1e39], "must have finite numbers"),
        ([1, 1, 1, 1, 10**400], "`chosen_token_weights` has an integer that is too large"),
        ([1, 1, 1, 1, "1"], "`chosen_token_weights` must be a list of numbers"),
    ],
)
def test_token_weights_that_cannot_be_used_are_bad(weights: list[Any], reason: str) -> None:
    with pytest.raises(BadRowError) as caught:
        read_tokenized({**WEIGHTED, "chosen_token_weights": weights}, 100, 1.0, 0.0, has_token_weights=True)
    assert reason in str(caught.value)


def test_token_weights_of_one_side_or_from_a_later_row_on_are_not_ignored(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
) -> None:
    one_side = {name: value for name, value in WEIGHTED.items() if name != "rejected_token_weights"}
    for rows in ([one_side], [ROW, WEIGHTED]):
        with pytest.raises(UserError, match="has `chosen_token_weights`, but the first row of the file does not have"):
            prepare(DataSettings(write_rows(*rows), template="raw"), chat_tokenizer, tmp_path / "store")
    with pytest.raises(UserError, match="no value for chosen_token_weights, rejected_token_weights"):
        prepare(DataSettings(write_rows(WEIGHTED, ROW), template="raw"), chat_tokenizer, tmp_path / "store")
    files = [write_rows(WEIGHTED, name="weighted.jsonl"), write_rows(ROW, name="plain.jsonl")]
    message = r"weighted.jsonl has pairs with token weights, but .*plain.jsonl has pairs without them"
    with pytest.raises(UserError, match=message):
        prepare(DataSettings(files, template="raw"), chat_tokenizer, tmp_path / "store")


@pytest.mark.parametrize("shard_rows", [2, 100])
def test_a_store_keeps_token_weights_and_its_digest_depends_on_them(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows, shard_rows: int
) -> None:
    rows = [{**WEIGHTED, "chosen_input_ids": [5, 6, 7, 8, 20 + number]} for number in range(5)]
    changed = [*rows[:4], {**rows[4], "rejected_token_weights": [9, 9, 0, 0.5]}]
    digests = []
    for name, content in (("one", rows), ("same", rows), ("changed", changed)):
        settings = DataSettings(write_rows(*content, name=f"{name}.jsonl"), template="raw", shard_rows=shard_rows)
        prepare(settings, chat_tokenizer, tmp_path / name)
        store = ExampleStore.open(tmp_path / name)
        assert (store.kind, store.has_token_weights, store.unit) == ("pairs", True, "pairs")
        digests.append(store.digest)
    assert digests[0] == digests[1] != digests[2]
    assert [response.weights.tolist() for response in store[4].responses] == [[0.5, 3, 2], [0, 0.5]]
    assert store[4].chosen.mask.tolist() == [True, False, True]
    hashes = [np.concatenate(list(ExampleStore.open(tmp_path / name).hashes())) for name in ("one", "changed")]
    assert (hashes[0] == hashes[1]).all()  # a cached reference scores the same tokens, whatever their weights


def test_a_truncated_response_loses_the_weights_of_its_last_tokens(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
) -> None:
    settings = DataSettings(write_rows(WEIGHTED), template="raw", sequence_length=4, truncation="response_end")
    prepare(settings, chat_tokenizer, tmp_path / "store")
    (chosen, rejected) = ExampleStore.open(tmp_path / "store")[0].responses
    assert (chosen.weights.tolist(), rejected.weights.tolist()) == ([0.5, 3], [0, 1])


def test_a_store_of_token_weights_is_inspected(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
) -> None:
    chat_tokenizer.save_pretrained(tmp_path / "model")
    prepare(DataSettings(write_rows(WEIGHTED), template="raw"), chat_tokenizer, tmp_path / "store")
    command = ["inspect", str(tmp_path / "store"), "--model", str(tmp_path / "model"), "--pair", "0", "--ids"]
    shown = CliRunner().invoke(app, command).output
    assert "3 response tokens, 2 scored, token weights 0.5 to 3" in shown
    assert all(text in shown for text in (":7*0.5", ":9*2", ":6 "))
