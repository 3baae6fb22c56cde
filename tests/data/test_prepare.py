"""`prepare`: every row is accounted for, stores are reproducible, and errors name the file and line."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.small_tokenizer import CHAT_TEMPLATE, make_tokenizer
from thresher.data.prepare.executor import local_executor, useful_processes
from thresher.data.prepare.prepare import (
    NoPairsError,
    PrepareProgress,
    fingerprinted_settings,
    prepare,
    store_fingerprint,
    tokenizer_digest,
)
from thresher.data.prepare.report import PrepareReport, report_of, truncation_of
from thresher.data.settings import DataSettings
from thresher.data.sources import readers
from thresher.data.store.reader import ExampleStore
from thresher.errors import UserError


def row(prompt: str = "Why?", chosen: str = "yes", rejected: str = "no", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def files_of(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in store.rglob("*") if file.is_file()}


def counts(report: PrepareReport) -> tuple[int, int, int, dict[str, int]]:
    return report.rows_read, report.pairs_kept, report.bad_rows, dict(report.dropped)


def test_every_row_is_kept_or_counted_by_reason(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    name = write_rows(
        *(row(), row(rejected="yes"), row(chosen=" \n"), row(" \n")),
        *(row(chosen="long " * 50), {"prompt": "Why?"}, row("And?")),
    )
    settings = DataSettings(name, sequence_length=40, on_bad_row="skip")
    report = prepare(settings, chat_tokenizer, tmp_path / "s")
    dropped = {"empty_prompt": 1, "empty_response": 1, "identical_sides": 1, "too_long": 1}
    assert counts(report) == (7, 2, 1, dropped)
    store = ExampleStore.open(tmp_path / "s")
    assert len(store) == 2
    assert PrepareReport.from_json(store.manifest["report"]) == report


@pytest.mark.parametrize("template", ["auto", "raw"])
@pytest.mark.parametrize("system", [{}, {"system": "Be kind."}], ids=["no system", "system"])
@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": ""},
        {"instruction": "", "input": ""},
        {"prompt": [{"role": "user", "content": ""}]},
        {"conversations": [{"from": "human", "value": "\n"}]},
    ],
    ids=lambda columns: "-".join(columns),
)
def test_a_prompt_without_text_is_dropped_although_the_template_writes_tokens(
    tmp_path: Path, chat_tokenizer: Any, write_rows: Any, columns: Any, system: Any, template: str
) -> None:
    full = {
        name: "Why?" if isinstance(value, str) else [{**value[0], "value": "Why?", "content": "Why?"}]
        for name, value in columns.items()
    }
    sides = {"chosen": "yes", "rejected": "no", **system}
    name = write_rows({**full, **sides}, {**columns, **sides})
    settings = DataSettings(name, template, system_prompt="Be brief.")
    assert counts(prepare(settings, chat_tokenizer, tmp_path / "s")) == (2, 1, 0, {"empty_prompt": 1})


@pytest.mark.parametrize("num_processes", [1, 16])
def test_one_block_is_tokenized_in_this_process(num_processes: int) -> None:
    """Another process would need to pickle the function."""
    reader = SimpleNamespace(read=lambda span: [span])
    results = local_executor(num_processes)(lambda task: (task, os.getpid()), reader, [7])
    assert list(results) == [(7, os.getpid())]


@pytest.mark.parametrize(("num_blocks", "processes"), [(0, 1), (1, 1), (3, 1), (4, 2), (31, 15), (32, 16)])
def test_a_process_is_started_for_two_blocks_or_more(num_blocks: int, processes: int) -> None:
    assert useful_processes(16, num_blocks) == processes
    assert useful_processes(1, num_blocks) == 1


def test_a_report_whose_counts_do_not_add_up_is_an_error() -> None:
    with pytest.raises(AssertionError, match="3 rows were read, but 2 are accounted for"):
        PrepareReport(files=(), rows_read=3, pairs_kept=1, dropped={"too_long": 1})


@pytest.mark.parametrize(
    "damage", [{"length_bias": {}}, {"files": 3}, {"percentiles": []}, {"rows_read": 2}, {"new": 1}]
)
def test_a_damaged_report_is_a_user_error(damage: dict[str, Any]) -> None:
    report = PrepareReport(files=(), rows_read=1, pairs_kept=1).to_json()
    assert report_of(SimpleNamespace(manifest={"report": report})).rows_read == 1
    for manifest in ({}, {"report": report | damage}):
        with pytest.raises(UserError, match=r"the report of the store s is damaged \(.*\); prepare it again"):
            report_of(SimpleNamespace(manifest=manifest, path="s"))


def test_weight_and_margin_reach_the_store(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    prepare(DataSettings(write_rows(row(weight=0.5, margin=2))), chat_tokenizer, tmp_path / "s")
    pair = ExampleStore.open(tmp_path / "s")[0]
    assert (pair.weight, pair.margin) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("truncation", "kept", "truncated", "dropped"),
    [
        ("drop", 1, {}, {"too_long": 2}),
        ("prompt_start", 2, {"prompt_start": 1}, {"too_long": 1}),
        ("response_end", 2, {"response_end": 1}, {"too_long": 1}),
    ],
)
def test_truncation_is_counted_by_kind(
    tmp_path: Path,
    write_rows: Any,
    truncation: Any,
    kept: int,
    truncated: dict[str, int],
    dropped: dict[str, int],
) -> None:
    long_prompt, long_response = row("w" * 90 + "?"), row(chosen="yes" + "w" * 90)
    tokenizer = make_tokenizer()
    settings = DataSettings(
        write_rows(row(), long_prompt, long_response), "raw", sequence_length=40, truncation=truncation
    )
    report = prepare(settings, tokenizer, tmp_path / "s")
    assert (report.pairs_kept, report.truncated, report.dropped) == (kept, truncated, dropped)
    store = ExampleStore.open(tmp_path / "s")
    assert all(int(each[0] + each[1:].max()) <= 40 for each in store.lengths)


@pytest.mark.parametrize(("num_long", "warns"), [(0, False), (1, False), (2, True)])
def test_dropping_more_than_5_percent_as_too_long_is_a_warning_with_the_length_that_keeps_95(
    tmp_path: Path, write_rows: Any, num_long: int, warns: bool
) -> None:
    rows = [row(chosen=f"{n:02} " + "w" * n) for n in range(20 - num_long)]
    rows += [row(chosen=f"{n} " + "w" * 10 * n) for n in range(9, 9 + num_long)]
    name = write_rows(*rows)
    report = prepare(DataSettings(name, "raw", sequence_length=45), make_tokenizer(), tmp_path / "s")
    assert report.dropped == ({"too_long": num_long} if num_long else {})
    assert report_of(ExampleStore.open(tmp_path / "s")) == report
    warning = report.truncation_warning("drop", "length=", "cut=")
    assert (warning is not None) == warns
    if warns:
        keep = report.length_to_keep_95
        assert warning == (
            f"2 of 20 pairs (10%) are too long and were dropped; length={keep} keeps 95 %, and cut=prompt_start or "
            "cut=response_end truncates pairs instead"
        )
        # 19 of 20 pairs are 95 %; one token less keeps 18
        for length, kept in ((keep, 19), (keep - 1, 18)):
            again = prepare(DataSettings(name, "raw", sequence_length=length), make_tokenizer(), tmp_path / str(length))
            assert again.pairs_kept == kept


@pytest.mark.parametrize(
    ("truncation", "long", "advice"),
    [
        (
            "response_end",
            "prompt",
            "have a prompt that alone is too long and were dropped; length={} keeps 95 %, and "
            "cut=prompt_start truncates the prompts instead",
        ),
        (
            "prompt_start",
            "chosen",
            "have responses that alone are too long and were dropped; length={} keeps 95 %, and "
            "cut=response_end truncates the responses instead",
        ),
    ],
)
def test_the_warning_about_dropped_pairs_advises_what_is_not_set(
    tmp_path: Path, write_rows: Any, truncation: Any, long: str, advice: str
) -> None:
    name = write_rows(row(), row(**{long: "w" * 90}))
    settings = DataSettings(name, "raw", sequence_length=40, truncation=truncation)
    report = prepare(settings, make_tokenizer(), tmp_path / "s")
    keep = report.length_to_keep_95
    assert report.truncation_warning(truncation, "length=", "cut=") == f"1 of 2 pairs (50%) {advice.format(keep)}"
    assert truncation_of(ExampleStore.open(tmp_path / "s")) == truncation
    for length, kept in ((keep, 2), (keep - 1, 1)):
        limited = replace(settings, sequence_length=length)
        assert prepare(limited, make_tokenizer(), tmp_path / str(length)).pairs_kept == kept
    with pytest.raises(
        NoPairsError, match=rf"raise sequence_length or set \S+truncation={advice.partition('cut=')[2].split()[0]}\)"
    ):
        prepare(replace(settings, file_name=write_rows(row(**{long: "w" * 90}))), make_tokenizer(), tmp_path / "none")


def test_sides_made_equal_by_truncation_are_dropped_and_counted(tmp_path: Path, write_rows: Any) -> None:
    same = "w" * 90
    name = write_rows(row(), row(chosen=f"{same}a", rejected=f"{same}b"))
    settings = DataSettings(name, "raw", sequence_length=40, truncation="response_end")
    report = prepare(settings, make_tokenizer(), tmp_path / "s")
    assert report.dropped == {"nothing_left_after_truncation": 1}
    assert report.truncated == {}


def test_a_bad_row_is_an_error_with_file_and_line(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    name = write_rows(row(), row(), {"prompt": "Why?", "chosen": 3, "rejected": "no"})
    with pytest.raises(UserError) as error:
        prepare(DataSettings(name), chat_tokenizer, tmp_path / "s")
    assert str(error.value) == (
        f"1 of 3 rows is bad; first: {name}, line 3: `chosen` must be text or messages, got int. Fix it, or set "
        "actor_train.data_args.on_bad_row=skip, which drops such rows, or actor_train.data_args.on_bad_row=quarantine, "
        "which collects them in a file"
    )
    assert not (tmp_path / "s").exists()


def test_all_bad_rows_are_counted_before_the_error_and_shown_by_reason_with_the_first_lines(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    rows = [row(f"q{number}?") for number in range(1200)]
    for number in (50, 600, 700, 1100):
        rows[number]["chosen"] = 3
    rows[1150] = {"prompt": "Why?"}
    settings = DataSettings(write_rows(*rows), section="validation.data_args")
    with pytest.raises(UserError) as error:
        prepare(settings, chat_tokenizer, tmp_path / "s")
    start, _, end = str(error.value).partition(" Fix them, or set ")
    assert start == (
        f"5 of 1,200 rows are bad; first: {settings.file_name}, line 51: `chosen` must be text or messages, got int."
    )
    assert end.startswith("validation.data_args.on_bad_row=skip, which")
    seen: list[PrepareProgress] = []
    report = prepare(replace(settings, on_bad_row="skip"), chat_tokenizer, tmp_path / "s", seen.append)
    assert [text for _, text in report.notes() if "bad row" in text] == [
        f"4 bad rows: `chosen` must be text or messages, got int ({settings.file_name}, line 51, 601, 701)",
        f"1 bad row: no value for chosen, rejected; its columns are prompt ({settings.file_name}, line 1151)",
    ]
    assert report_of(ExampleStore.open(tmp_path / "s")) == report
    assert [each.bad_rows for each in seen] == [1, 3, 5]


def test_bad_rows_have_the_lines_of_their_file_however_it_is_divided(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BYTES_PER_SPAN", 2000)
    rows = [row(f"q{number}?") for number in range(200)]
    for number in (10, 100, 190):
        rows[number]["chosen"] = 3
    settings = DataSettings(write_rows(*rows), on_bad_row="skip")
    assert Path(settings.file_name).stat().st_size > 4 * 2000
    notes = prepare(settings, chat_tokenizer, tmp_path / "s").notes()
    assert any(text.endswith(f"({settings.file_name}, line 11, 101, 191)") for _, text in notes), notes


def test_a_line_that_is_not_json_or_not_utf8_is_a_bad_row(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    name = write_rows(row())
    with Path(name).open("ab") as stream:
        stream.write(b'{"prompt": \n{"prompt": "\xff"}\n[1]\n')
    report = prepare(DataSettings(name, on_bad_row="quarantine"), chat_tokenizer, tmp_path / "s")
    assert counts(report) == (4, 1, 3, {})
    quarantined = [json.loads(line) for line in (tmp_path / "s.quarantine.jsonl").read_text().splitlines()]
    assert [each["number"] for each in quarantined] == [2, 3, 4]
    assert [each["reason"].split(":")[0] for each in quarantined] == [
        "not JSON",
        "not UTF-8",
        "expected an object with columns, got list",
    ]
    assert quarantined[0] == {**quarantined[0], "file": name, "unit": "line", "content": '{"prompt": '}


def test_the_first_row_determines_the_row_format(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    name = write_rows(row(), {"instruction": "Why?", "chosen": "yes", "rejected": "no"})
    report = prepare(DataSettings(name, on_bad_row="skip"), chat_tokenizer, tmp_path / "s")
    assert counts(report) == (2, 1, 1, {})
    assert [file.shape for file in report.files] == ["prompt"]


def test_row_format_and_unused_columns_are_reported_per_file(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    names = [
        write_rows(row(score=3), name="a.jsonl"),
        write_rows({"instruction": "Why?", "output": "o", "chosen": "yes", "rejected": "no!"}, name="b.jsonl"),
    ]
    report = prepare(DataSettings(names), chat_tokenizer, tmp_path / "s")
    assert [(file.shape, file.rows, file.unused_columns) for file in report.files] == [
        ("prompt", 1, ("score",)),
        ("instruction", 1, ("output",)),
    ]


def test_labelled_rows_are_joined_and_counted(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    answers = [("p", "good", True), ("p", "bad", False), ("q", "alone", True), ("p", "worse", False)]
    rows = [{"prompt": prompt, "completion": text, "label": label} for prompt, text, label in answers]
    report = prepare(DataSettings(write_rows(*rows), join_labelled=True), chat_tokenizer, tmp_path / "s")
    assert (report.rows_read, report.pairs_kept, report.rows_joined) == (4, 1, 1)
    assert report.dropped == {"unpaired": 2}
    pair = ExampleStore.open(tmp_path / "s")[0]
    assert chat_tokenizer.decode(pair.chosen.ids) == "good<|im_end|>"
    assert chat_tokenizer.decode(pair.rejected.ids) == "bad<|im_end|>"


def test_an_error_without_any_pair_states_the_reason_and_leaves_no_store(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    name = write_rows({"prompt": "p", "completion": "c", "label": True})
    with pytest.raises(NoPairsError, match=r"none of 1 rows became a pair: 1 unpaired \(a pair needs a good") as error:
        prepare(DataSettings(name, join_labelled=True), chat_tokenizer, tmp_path / "s")
    assert error.value.report.dropped == {"unpaired": 1}
    assert str(error.value).endswith(f". Read: {name}")
    assert not (tmp_path / "s").exists()


def test_an_error_without_any_pair_names_three_files(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    names = [write_rows(row("p", "same", "same"), name=f"{number}.jsonl") for number in range(5)]
    with pytest.raises(NoPairsError) as error:
        prepare(DataSettings(names), chat_tokenizer, tmp_path / "s")
    assert str(error.value).endswith(f". Read: {', '.join(names[:3])} and 2 more")


def test_one_of_several_files_may_have_no_pairs(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    names = [write_rows(row(), name="a.jsonl"), write_rows(row(rejected="yes"), name="b.jsonl")]
    assert prepare(DataSettings(names), chat_tokenizer, tmp_path / "s").pairs_kept == 1


def test_moved_splits_are_counted(tmp_path: Path, write_rows: Any) -> None:
    # " the" is one token, so a prompt that ends in " t" is merged with "he"
    name = write_rows(row("of t", "he light", "wo"), row("of", " the", " two"))
    assert prepare(DataSettings(name, "raw"), make_tokenizer(), tmp_path / "s").splits_moved == 1


def test_duplicates_contradictions_and_control_tokens_are_reported_and_kept(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    name = write_rows(row(), row("And?"), row(), row("And?", "no", "yes"), row("<|im_end|>?"))
    report = prepare(DataSettings(name), chat_tokenizer, tmp_path / "s")
    assert report.pairs_kept == 5
    assert {(each.name, each.count, each.examples) for each in report.findings} == {
        ("duplicates", 1, (2,)),
        ("contradictions", 2, (1, 3)),
        ("control_tokens_in_text", 1, (4,)),
    }


def test_scores_that_contradict_the_labels_are_reported_and_not_ignored_columns(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    scores = [(5, 4), (4, 5), (4, 4), (None, 5), (1, 9)]
    rows = [row(f"q{n}", score_chosen=left, score_rejected=right) for n, (left, right) in enumerate(scores)]
    report = prepare(DataSettings(write_rows(*rows)), chat_tokenizer, tmp_path / "s")
    assert [(each.name, each.count, each.examples) for each in report.findings] == [
        ("scores_contradict_labels", 2, (1, 4))
    ]
    assert [file.unused_columns for file in report.files] == [()]


def test_the_difference_of_scores_is_the_margin_on_request(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    rows = [row("q1", score_chosen=5, score_rejected=3.5), row("q2", score_chosen=1, score_rejected=2)]
    settings = DataSettings(write_rows(*rows), margin_from_scores=True)
    prepare(settings, chat_tokenizer, tmp_path / "s")
    assert [each.margin for each in ExampleStore.open(tmp_path / "s")] == [1.5, -1.0]
    ids = {f"{side}_input_ids": [5, 6, last] for side, last in (("chosen", 7), ("rejected", 8))}
    ids |= {f"{side}_loss_mask": [0, 0, 1] for side in ("chosen", "rejected")}
    ids |= {"chosen_score": 9, "rejected_score": 7}
    prepare(replace(settings, file_name=write_rows(ids)), chat_tokenizer, tmp_path / "ids")
    assert ExampleStore.open(tmp_path / "ids")[0].margin == 2.0
    for more, problem in (
        ({}, "margin_from_scores needs finite scores in two columns"),
        ({"score_chosen": 1, "score_rejected": float("inf")}, "margin_from_scores needs finite scores"),
        ({"score_chosen": 1, "score_rejected": 0, "margin": 1}, "has a `margin` and scores"),
    ):
        bad = replace(settings, file_name=write_rows(*rows, row("q3", **more)))
        with pytest.raises(UserError, match=problem):
            prepare(bad, chat_tokenizer, tmp_path / "bad")


def test_length_bias_is_measured_in_response_tokens(tmp_path: Path, write_rows: Any) -> None:
    tokenizer = make_tokenizer()
    name = write_rows(row(chosen="zzz", rejected="z"), row(chosen="zz", rejected="qq"), row(chosen="z", rejected="zz"))
    bias = prepare(DataSettings(name, "raw"), tokenizer, tmp_path / "s").length_bias
    assert bias is not None
    assert (bias.share_chosen_longer, bias.share_equal) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert (bias.mean_chosen, bias.mean_rejected) == (pytest.approx(3.0), pytest.approx(8 / 3))


def many_rows(write_rows: Any) -> list[str]:
    rows = [row(f"q{n}?", "yes " * (n % 7 + 1), "no " * (n % 5)) for n in range(1500)]
    labelled = [{"prompt": f"l{n % 9}", "completion": f"a{n}", "label": n % 2 == 0} for n in range(700)]
    return [write_rows(*rows, {"broken": 1}, name="a.jsonl"), write_rows(*labelled, name="b.jsonl")]


def test_preparing_again_gives_the_same_bytes(tmp_path: Path, templated_tokenizer: Any, write_rows: Any) -> None:
    settings = DataSettings(many_rows(write_rows), join_labelled=True, on_bad_row="skip", shard_rows=600)
    first = prepare(settings, templated_tokenizer, tmp_path / "a")
    assert first == prepare(settings, templated_tokenizer, tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert len(ExampleStore.open(tmp_path / "a").manifest["shards"]) > 2


@pytest.mark.slow
@pytest.mark.distributed
def test_one_and_four_processes_give_the_same_bytes(tmp_path: Path, templated_tokenizer: Any, write_rows: Any) -> None:
    settings = DataSettings(many_rows(write_rows), join_labelled=True, on_bad_row="quarantine", shard_rows=600)
    prepare(settings, templated_tokenizer, tmp_path / "one")
    prepare(replace(settings, num_processes=4), templated_tokenizer, tmp_path / "four")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "four")
    quarantined = [(tmp_path / f"{name}.quarantine.jsonl").read_bytes() for name in ("one", "four")]
    assert quarantined[0] == quarantined[1] != b""


@pytest.fixture
def templated_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def test_the_fingerprint_depends_on_everything_that_changes_the_pairs(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    name = write_rows(row())
    settings = DataSettings(name)
    fingerprint = store_fingerprint(settings, chat_tokenizer)
    prepare(settings, chat_tokenizer, tmp_path / "s")
    assert ExampleStore.open(tmp_path / "s", expected_fingerprint=fingerprint).fingerprint == fingerprint
    assert store_fingerprint(replace(settings, num_processes=3, shard_rows=5), chat_tokenizer) == fingerprint
    copy = write_rows(row(), name="copy.jsonl")
    assert store_fingerprint(replace(settings, file_name=copy), chat_tokenizer) == fingerprint
    others = [
        replace(settings, sequence_length=99),
        replace(settings, truncation="prompt_start"),
        replace(settings, template="raw"),
        replace(settings, template_arguments={"mood": "good"}),
        replace(settings, file_name=write_rows(row("And?"), name="other.jsonl")),
        replace(settings, file_name=[name, name]),
    ]
    fingerprints = {store_fingerprint(each, chat_tokenizer) for each in others}
    assert len(fingerprints) == len(others)
    assert fingerprint not in fingerprints


def test_the_tokenizer_digest_depends_on_ids_and_not_on_padding_or_template() -> None:
    tokenizer, same, other = make_tokenizer(), make_tokenizer(), make_tokenizer(eos_token="</s>")
    digest = tokenizer_digest(tokenizer)
    same.pad_token = "</s>"
    same(["a", "a b c"], padding=True, truncation=True, max_length=2)
    same.chat_template = "x"
    assert tokenizer_digest(same) == digest != tokenizer_digest(other)
    same.add_tokens(["<new>"])
    assert tokenizer_digest(same) != digest


def test_progress_is_reported_up_to_the_end_of_the_files(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    seen: list[PrepareProgress] = []
    name = write_rows(*[row(f"q{n}?") for n in range(1100)])
    prepare(DataSettings(name), chat_tokenizer, tmp_path / "s", seen.append)
    assert [each.rows_read for each in seen] == [512, 1024, 1100]
    assert seen[-1].bytes_read == seen[-1].bytes_total == Path(name).stat().st_size


def test_an_existing_output_is_refused_before_any_work(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    prepare(DataSettings(write_rows(row())), chat_tokenizer, tmp_path / "s")
    with pytest.raises(UserError, match="already exists"):
        prepare(DataSettings("not-there.jsonl"), chat_tokenizer, tmp_path / "s")


def test_the_last_rows_of_a_file_are_kept(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    name = write_rows(*[row(f"q{n}?") for n in range(1025)])
    Path(name).write_text(Path(name).read_text().rstrip("\n"))
    report = prepare(DataSettings(name, shard_rows=512), chat_tokenizer, tmp_path / "s")
    store = ExampleStore.open(tmp_path / "s")
    assert report.pairs_kept == len(store) == 1025
    assert [shard["num_pairs"] for shard in store.manifest["shards"]] == [512, 512, 1]
    assert "q1024?" in chat_tokenizer.decode(store[1024].prompt_ids)


def test_max_samples_limits_each_file_and_is_part_of_the_fingerprint(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any
) -> None:
    rows = [{"prompt": "Why? ", "chosen": f"yes {number}", "rejected": "no"} for number in range(6)]
    names = [write_rows(*rows, name="a.jsonl"), write_rows(*rows[::-1], name="b.jsonl")]
    limited = DataSettings(names, template="raw", max_samples=2)
    report = prepare(limited, chat_tokenizer, tmp_path / "store")
    assert [file.rows for file in report.files] == [2, 2]
    assert report.pairs_kept == 4
    store = ExampleStore.open(tmp_path / "store")
    texts = [chat_tokenizer.decode(store[number].chosen.ids, skip_special_tokens=True) for number in range(4)]
    assert [text[-1] for text in texts] == ["0", "1", "5", "4"]
    fingerprints = {store_fingerprint(replace(limited, max_samples=n), chat_tokenizer) for n in (None, 2, 3)}
    assert len(fingerprints) == 3
    assert "max_samples" not in fingerprinted_settings(replace(limited, max_samples=None))


@pytest.mark.parametrize("template", ["auto", "raw"])
def test_the_system_prompt_is_that_of_rows_without_one(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: Any, template: str
) -> None:
    plain, given = row(), row("And?", system="Be kind.")
    default = DataSettings(write_rows(plain, given), template=template, system_prompt="Be brief.")
    written = DataSettings(write_rows({**plain, "system": "Be brief."}, given, name="written.jsonl"), template=template)
    for name, settings in (("default", default), ("written", written)):
        prepare(settings, chat_tokenizer, tmp_path / name)
    assert ExampleStore.open(tmp_path / "default").digest == ExampleStore.open(tmp_path / "written").digest
    assert store_fingerprint(default, chat_tokenizer) != store_fingerprint(
        replace(default, system_prompt=None), chat_tokenizer
    )
