"""Real data files: every row is kept, dropped for a counted reason, or bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thresher.data.prepare.findings import find_leaks
from thresher.data.prepare.prepare import DataSettings, prepare
from thresher.data.store.reader import ExampleStore

pytestmark = pytest.mark.real

CHATML = str(Path(__file__).with_name("chatml.jinja"))
# file: (row format, rows, pairs kept, count of other rows by reason)
FILES: dict[str, tuple[str, int, int, dict[str, int]]] = {
    "anthropic-evals/agreeableness.jsonl": ("evals", 1000, 1000, {}),
    "anthropic-evals/conscientiousness.jsonl": ("evals", 1000, 1000, {}),
    "anthropic-evals/interest-in-science.jsonl": ("evals", 1000, 1000, {}),
    "anthropic-evals/risk-averse.jsonl": ("evals", 1000, 1000, {}),
    "hh-rlhf-test/harmless-base.test.jsonl.gz": ("transcripts", 2312, 2308, {"empty_response": 4}),
    "hh-rlhf-test/helpful-base.test.jsonl.gz": (
        "transcripts",
        2354,
        2348,
        {"empty_response": 4, "identical_sides": 2},
    ),
    "hh-rlhf-test/helpful-online.test.jsonl.gz": (
        "transcripts",
        1137,
        1130,
        {"empty_response": 3, "identical_sides": 2, "bad": 2},
    ),
    "hh-rlhf-test/helpful-rejection-sampled.test.jsonl.gz": ("transcripts", 2749, 2717, {"identical_sides": 32}),
    "llama-factory/dpo_en_demo.json": ("conversations", 300, 300, {}),
    "llama-factory/kto_en_demo.json": ("labelled_messages", 300, 300, {}),
    "orca-dpo/validation.jsonl": ("openai", 284, 284, {}),
    "rasbt-preference/instruction-data-with-preference.json": ("instruction", 1100, 1094, {"identical_sides": 6}),
    "ultrafeedback-subset/uf_eval_clean.jsonl": ("prompt", 200, 199, {"identical_sides": 1}),
    "ultrafeedback-subset/uf_train_clean.jsonl": ("prompt", 1000, 994, {"empty_response": 2, "identical_sides": 4}),
}
# one file of transcripts is enough for plain text
RAW = [name for name in FILES if "hh-rlhf" not in name or "online" in name]


@pytest.mark.covered
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "template"), [*((name, "chatml") for name in FILES), *((name, "raw") for name in RAW)]
)
def test_every_row_of_a_real_file_is_counted(
    name: str, template: str, shared_data: Path, stories_tokenizer: Any, tmp_path: Path
) -> None:
    row_format, rows, kept, others = FILES[name]
    settings = DataSettings(
        str(shared_data / name),
        CHATML if template == "chatml" else "raw",
        sequence_length=None,
        on_bad_row="skip",
    )
    report = prepare(settings, stories_tokenizer, tmp_path / "s")
    assert [file.shape for file in report.files] == [row_format]
    assert (report.rows_read, report.pairs_kept) == (rows, kept)
    found = {**report.dropped, "bad": report.bad_rows, "joined": report.rows_joined}
    assert {cause: count for cause, count in found.items() if count} == others
    assert_valid(ExampleStore.open(tmp_path / "s"), stories_tokenizer, template)


def assert_valid(store: ExampleStore, tokenizer: Any, template: str) -> None:
    """Check the invariants of a pair on a sample."""
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False).input_ids[-8:]
    for number in range(0, len(store), max(1, len(store) // 20)):
        pair = store[number]
        for ids, *_ in pair.responses:
            full = np.concatenate([pair.prompt_ids, ids])
            assert full[-1] == tokenizer.eos_token_id
            # <s> is both BOS and EOS: plain text has it at both ends, this ChatML template only at the end
            assert np.count_nonzero(full == tokenizer.eos_token_id) == (2 if template == "raw" else 1)
        if template == "chatml":
            assert pair.prompt_ids[-len(header) :].tolist() == header


def test_the_first_pair_of_the_rasbt_file_decodes_to_the_expected_text(
    shared_data: Path, stories_tokenizer: Any, tmp_path: Path
) -> None:
    file = shared_data / "rasbt-preference" / "instruction-data-with-preference.json"
    prepare(DataSettings(str(file), CHATML), stories_tokenizer, tmp_path / "s")
    pair = ExampleStore.open(tmp_path / "s")[0]
    instruction = "Evaluate the following phrase by transforming it into the spelling given.\n\nfreind --> friend"
    assert stories_tokenizer.decode(pair.prompt_ids) == (
        f"<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert stories_tokenizer.decode(pair.chosen.ids) == (
        'The spelling of the given phrase "freind" is incorrect, the correct spelling is "friend".<|im_end|>\n<s>'
    )


def test_a_raw_transcript_equals_the_text_of_the_file(
    shared_data: Path, stories_tokenizer: Any, tmp_path: Path
) -> None:
    import gzip
    import json

    file = shared_data / "hh-rlhf-test" / "helpful-online.test.jsonl.gz"
    prepare(DataSettings(str(file), "raw", sequence_length=None, on_bad_row="skip"), stories_tokenizer, tmp_path / "s")
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        first = json.loads(next(stream))
    pair = ExampleStore.open(tmp_path / "s")[0]
    for side, ids in (("chosen", pair.chosen.ids), ("rejected", pair.rejected.ids)):
        expected = [*stories_tokenizer(first[side]).input_ids, stories_tokenizer.eos_token_id]
        assert [*pair.prompt_ids.tolist(), *ids.tolist()] == expected


def test_the_ultrafeedback_splits_share_no_pair(shared_data: Path, stories_tokenizer: Any, tmp_path: Path) -> None:
    for split in ("train", "eval"):
        file = shared_data / "ultrafeedback-subset" / f"uf_{split}_clean.jsonl"
        prepare(DataSettings(str(file), "raw", sequence_length=None), stories_tokenizer, tmp_path / split)
    pairs, _ = find_leaks(ExampleStore.open(tmp_path / "eval"), ExampleStore.open(tmp_path / "train"))
    assert pairs.count == 0
