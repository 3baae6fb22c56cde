"""Stores of labelled responses and of lists: what a row of each format becomes, what is dropped, how it is stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.data.conftest import WriteRows
from tests.data.test_pair_store import assert_equal, ids
from tests.data.test_prepare_resume import files_of, kill_and_finish, stop_after
from thresher.data.example import Example, ExampleBatch, Kind, Response
from thresher.data.prepare.prepare import NoPairsError, prepare, store_fingerprint
from thresher.data.prepare.report import report_of
from thresher.data.rows.formats import MAX_RESPONSES, PreferenceRow, detect_format, to_preference_row
from thresher.data.rows.parsing import BadRowError
from thresher.data.settings import DataSettings
from thresher.data.store.arrow_schema import hash_example, pairs_to_record_batch
from thresher.data.store.reader import ExampleStore
from thresher.data.store.writer import StoreWriter
from thresher.errors import UserError

WHY = [{"role": "user", "content": "Why?"}]
ANSWERS = ["Because.", "Hm.", "No."]


def say(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def read(row: dict[str, Any], kind: Kind) -> PreferenceRow:
    row_format = detect_format(row, {}, "rows.jsonl, line 1")
    assert row_format.kind == kind
    return to_preference_row(row, row_format, {})


@pytest.mark.parametrize("label", [{"label": False}, {"label": "false"}, {"label": 0}, {"kto_tag": False}])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "completion": "No."},
        {"prompt": WHY, "completion": [say("No.")]},
        {"messages": [*WHY, say("No.")]},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "No."}]},
        {"instruction": "Why?", "input": "", "output": "No."},
    ],
)
def test_a_row_of_one_answer_is_undesirable_if_its_label_says_so_and_desirable_without_one(row, label) -> None:
    for columns, value in ((row | label, 0.0), (row, 1.0)):
        found = read(columns, "labels")
        assert (found.prompt, found.responses, found.values) == (WHY, ([say("No.")],), (value,))


def test_a_null_label_in_the_first_row_does_not_make_the_file_all_desirable() -> None:
    for name in ("label", "kto_tag"):
        with pytest.raises(UserError, match="unrecognized row format"):
            detect_format({"prompt": "Why?", "completion": "No.", name: None}, {}, "here")


@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_a_label_in_a_file_without_labels_is_not_ignored(name) -> None:
    row_format = detect_format({"prompt": "Why?", "completion": "No."}, {}, "here")
    with pytest.raises(BadRowError, match="the row has a `label`, and the first row of the file has none"):
        to_preference_row({"prompt": "Why?", "completion": "Yes.", name: False}, row_format, {})


def test_a_label_that_is_neither_true_nor_false_is_a_bad_row() -> None:
    with pytest.raises(BadRowError, match="`label` must be true or false, got 'good'"):
        read({"prompt": "Why?", "completion": "No.", "label": "good"}, "labels")


SCORES = [3, 2, 1]
SCORED = list(zip(ANSWERS, SCORES, strict=True))


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ({"prompt": "Why?", "completions": [{"response": a, "overall_score": s} for a, s in SCORED]}, SCORES),
        ({"instruction": "Why?", "completions": [{"text": a, "rating": s} for a, s in SCORED]}, SCORES),
        ({"messages": WHY, "completions": [{"completion": a, "score": f"{s}"} for a, s in SCORED]}, SCORES),
        ({"prompt": "Why?", "answers": [{"answer": a, "rank": 4.0 - s} for a, s in SCORED]}, [-1, -2, -3]),
        ({"prompt": "Why?", "responses": ANSWERS, "rewards": [0.5, 0.25, -1]}, [0.5, 0.25, -1]),
        ({"prompt": "Why?", "completions": ANSWERS, "ranks": [0, 1, 2]}, [0, -1, -2]),
        ({"context": WHY, "completions": [{"completion": [say(a)], "rank": -s} for a, s in SCORED]}, SCORES),
        ({"instruction": "Why?", "output": ANSWERS}, [0, -1, -2]),
        ({"messages": [*WHY, say(ANSWERS[0])], "rejected_response": ANSWERS[1:]}, [1, 0, 0]),
    ],
)
def test_every_format_of_lists_gives_the_same_responses_best_first(row, values) -> None:
    found = read(row, "lists")
    assert (found.prompt, found.values) == (WHY, tuple(values))
    assert found.responses == tuple([say(answer)] for answer in ANSWERS)


@pytest.mark.parametrize(
    ("row", "names", "values"),
    [
        ({"ask": "Why?", "reply": "No.", "good": False}, {"completion": "reply", "label": "good"}, (0.0,)),
        (
            {"ask": "Why?", "replies": ["No.", "Yes."], "stars": [1, 5]},
            {"completions": "replies", "scores": "stars"},
            (5, 1),
        ),
        (
            {"ask": "Why?", "replies": ["No.", "Yes."], "overall_scores": [5, 1], "stars": [1, 4]},
            {"completions": "replies", "scores": "stars"},
            (4, 1),
        ),
    ],
)
def test_labels_and_lists_may_have_columns_of_any_name(row, names, values) -> None:
    settings = DataSettings("rows.jsonl", prompt_key="ask", **{f"{name}_key": column for name, column in names.items()})
    row_format = detect_format(row, settings.column_names, "here")
    assert to_preference_row(row, row_format, settings.column_names).values == values
    with pytest.raises(UserError, match="unrecognized row format"):
        detect_format(row, {"prompt": "ask"}, "here")


def test_responses_are_sorted_by_score_and_equal_ones_keep_their_order() -> None:
    row = {"prompt": "Why?", "responses": ["a", "b", "c", "d"], "scores": [1, 2, 1, 3]}
    found = read(row, "lists")
    assert [side[0]["content"] for side in found.responses] == ["d", "b", "a", "c"]
    assert found.values == (3, 2, 1, 1)


def test_the_scores_of_a_row_are_the_first_key_that_all_responses_have() -> None:
    items = [{"text": "a", "score": 8, "rank": 1}, {"text": "b", "score": None, "rank": 2}]
    assert read({"prompt": "Why?", "completions": items}, "lists").values == (-1, -2)


@pytest.mark.parametrize("label", [{}, {"label": True}])
def test_a_rejected_answer_next_to_a_completion_is_not_dropped(label) -> None:
    row = {"prompt": "Why?", "completion": "Because.", "rejected": "No.", **label}
    with pytest.raises(UserError, match=r"no chosen column\. Name your columns with chosen_key="):
        detect_format(row, {}, "here")
    assert detect_format(row, {"chosen": "completion"}, "here").kind == "pairs"
    assert detect_format({**row, "rejected": None}, {}, "here").kind == "labels"


def test_two_completions_of_different_rank_stay_a_pair() -> None:
    completions = [{"rank": 1, "completion": [say("No.")]}, {"rank": 0, "completion": [say("Because.")]}]
    found = read({"context": WHY, "completions": completions}, "pairs")
    assert (found.responses, found.values) == (([say("Because.")], [say("No.")]), ())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"completions": []}, "`completions` must be a list of responses"),
        ({"completions": "a"}, "`completions` must be a list of responses"),
        ({"completions": ["a", "b"]}, "a response of `completions` has no score; write overall_score, score"),
        ({"completions": ["a", "b"], "scores": [1]}, "`scores` must be a list with a number for each response"),
        ({"completions": ["a", "b"], "scores": [1, "high"]}, "`score` must be a number, got 'high'"),
        ({"completions": ["a", "b"], "scores": [1, float("inf")]}, "`score` must be a finite number"),
        ({"completions": ["a", "b"], "scores": [1, None]}, "not every response of `completions` has a number `score`"),
        (
            {"completions": [{"text": "a", "score": 8, "rank": None}, {"text": "b", "score": None, "rank": 2}]},
            "not every response of `completions` has a number `score or rank`; write the same key into each",
        ),
        ({"completions": [{"score": 1}]}, "a response of `completions` has no text; name it completion"),
        ({"completions": [{"text": 5, "score": 1}]}, "`response 1` must be text or messages, got int"),
        ({"completions": ["a"] * 257, "scores": [1] * 257}, f"257 responses; the limit is {MAX_RESPONSES}"),
    ],
)
def test_a_list_that_cannot_be_read_states_the_reason(change, reason) -> None:
    row_format = detect_format({"prompt": "Why?", "completions": ["a"]}, {}, "here")
    with pytest.raises(BadRowError, match=reason):
        to_preference_row({"prompt": "Why?", **change}, row_format, {})


@pytest.fixture
def prepared(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows) -> Any:
    def build(*rows: dict[str, Any], **options: Any) -> ExampleStore:
        prepare(DataSettings(write_rows(*rows), **options), chat_tokenizer, tmp_path / "s", overwrite=True)
        return ExampleStore.open(tmp_path / "s")

    return build


def labelled(prompt: str, completion: str, label: object) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


def scored(prompt: str, *answers: tuple[str, float]) -> dict[str, Any]:
    return {"prompt": prompt, "completions": [{"text": text, "score": score} for text, score in answers]}


def texts(store: ExampleStore, tokenizer: Any) -> list[list[tuple[str, float]]]:
    return [
        [(tokenizer.decode(response.ids), response.value) for response in store[number].responses]
        for number in range(len(store))
    ]


def test_labelled_rows_become_one_response_each(prepared: Any, chat_tokenizer: Any) -> None:
    store = prepared(labelled("Why?", "yes", True), labelled("Why?", "no", False), labelled("How?", "so", 1))
    assert (store.kind, store.num_responses, len(store)) == ("labels", 1, 3)
    end = "<|im_end|>"
    assert texts(store, chat_tokenizer) == [[(f"yes{end}", 1.0)], [(f"no{end}", 0.0)], [(f"so{end}", 1.0)]]
    assert store.lengths.shape == (3, 2)
    expected = chat_tokenizer.apply_chat_template(WHY, add_generation_prompt=True)["input_ids"]
    assert store[0].prompt_ids.tolist() == expected


def test_a_pair_and_a_list_of_the_same_rows_have_the_same_tokens(prepared: Any) -> None:
    pair = prepared({"prompt": "Why?", "chosen": "Because it is.", "rejected": "Because."})[0]
    listed = prepared(scored("Why?", ("Because.", 1), ("Because it is.", 2)))[0]
    assert_equal(replace(pair, responses=tuple(r._replace(value=None) for r in listed.responses)), pair)
    assert hash_example(listed) == hash_example(pair)


def test_the_report_gives_the_share_of_desirable_answers_and_the_weights_for_kto(prepared: Any) -> None:
    """Four desirable and one undesirable: with a weight of 0.25 both count alike, and 4/3 of it is the upper end."""
    report = report_of(prepared(labelled("q", "no", False), *(labelled("q", f"a{n}", True) for n in range(4))))
    assert (report.kind, report.desirable, report.pairs_kept) == ("labels", 4, 5)
    assert [line for _, line in report.notes()][-1] == (
        "labels: 4 of 5 desirable (80%); for kto, desirable_weight 0.25 balances both counts; advised: up to 0.333"
    )
    assert dict(report.count_rows()) == {"rows read": 5, "labelled responses kept": 5}


def test_an_answer_with_both_labels_is_a_contradiction_and_with_one_a_duplicate(prepared: Any) -> None:
    rows = [labelled("q", "a", True), labelled("q", "b", True), labelled("q", "b", True), labelled("q", "a", False)]
    report = report_of(prepared(*rows))
    assert {each.name: each.examples for each in report.findings} == {"duplicates": (2,), "contradictions": (0, 3)}


def test_identical_responses_and_prompts_without_a_preference_are_dropped_and_counted(
    prepared: Any, chat_tokenizer: Any
) -> None:
    store = prepared(
        scored("a", ("x", 1), ("y", 3), ("x", 2)),
        scored("b", ("x", 1), ("x", 2)),
        scored("c", ("x", 1)),
        scored("d", ("x", 2), ("y", 2), ("z", 2)),
        scored("e", ("x", 2), ("y", 2), ("z", 1)),
        scored("f", ("x", 2), ("", 1), ("z", 1)),
    )
    end = "<|im_end|>"
    # of the identical ones, the best is kept
    assert texts(store, chat_tokenizer) == [
        [(f"y{end}", 3.0), (f"x{end}", 2.0)],
        [(f"x{end}", 2.0), (f"y{end}", 2.0), (f"z{end}", 1.0)],
    ]
    assert store.lengths.tolist() == [[len(store[0].prompt_ids), 2, 2, 0], [len(store[1].prompt_ids), 2, 2, 2]]
    assert dict(report_of(store).count_rows()) == {
        "rows read": 6,
        "lists kept": 2,
        "responses kept": 5,
        "identical responses dropped": 1,
        "dropped: empty response": 1,
        "dropped: equal values": 1,
        "dropped: too few responses": 2,
    }


def test_a_list_without_any_preference_is_an_error_that_says_so(prepared: Any) -> None:
    with pytest.raises(
        NoPairsError, match=r"became an example: 1 equal_values \(the responses of a list have the same"
    ):
        prepared(scored("a", ("x", 1), ("y", 1)))


def test_the_longest_response_of_a_list_decides_whether_it_fits(prepared: Any) -> None:
    rows = [scored("Why?", ("a", 3), ("b " * 30, 2), ("b " * 31, 1)), scored("Why?", ("a", 2), ("b", 1))]
    limit = prepared(rows[1]).longest_example + 10
    dropped = prepared(*rows, sequence_length=limit)
    assert (len(dropped), report_of(dropped).dropped) == (1, {"too_long": 1})
    cut = prepared(*rows, sequence_length=limit, truncation="response_end")
    # the two long responses begin alike, so one of them is left
    assert (len(cut), cut.longest_example, report_of(cut).truncated) == (2, limit, {"response_end": 1})
    assert cut.lengths[0, 1:].tolist() == [2, limit - len(cut[0].prompt_ids)]


def test_files_of_two_kinds_are_an_error_that_names_both(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
) -> None:
    pairs = write_rows({"prompt": "p", "chosen": "a", "rejected": "b"}, name="pairs.jsonl")
    labels = write_rows(labelled("p", "a", True), labelled("p", "b", False), name="labels.jsonl")
    both = DataSettings([pairs, labels])
    with pytest.raises(UserError, match=r"pairs.jsonl has pairs, but .*labels.jsonl has labels; .*join_labelled=true"):
        prepare(both, chat_tokenizer, tmp_path / "s")
    assert prepare(replace(both, join_labelled=True), chat_tokenizer, tmp_path / "s").pairs_kept == 2


def test_joining_changes_the_fingerprint_of_labelled_rows_only(
    chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows
) -> None:
    for row, changes in ((labelled("p", "a", True), True), ({"prompt": "p", "chosen": "a", "rejected": "b"}, False)):
        separate = DataSettings(write_rows(row))
        joined = replace(separate, join_labelled=True)
        assert (store_fingerprint(separate, chat_tokenizer) != store_fingerprint(joined, chat_tokenizer)) is changes


@st.composite
def any_list(draw: st.DrawFn) -> Example:
    responses = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = draw(ids)
        mask = np.asarray(draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))))
        responses.append(Response(tokens, mask if draw(st.booleans()) else None, draw(st.floats(-9, 9, width=32))))
    return Example(draw(ids), tuple(responses), draw(st.floats(0, 9, width=32)), draw(st.floats(0, 9, width=32)))


def canonical(example: Example) -> Example:
    """A mask that scores everything is read as none."""
    kept = (r._replace(mask=None) if r.mask is not None and r.mask.all() else r for r in example.responses)
    return replace(example, responses=tuple(kept))


def write_lists(path: Path, lists: list[Example], shard_rows: int, rows_per_batch: int) -> ExampleStore:
    with StoreWriter(path, shard_rows, kind="lists") as writer:
        for start in range(0, len(lists), rows_per_batch):
            piece = lists[start : start + rows_per_batch]
            writer.append(pairs_to_record_batch(piece, [hash_example(each) for each in piece], "lists"))
        writer.finish({"identity": "expected"})
    return ExampleStore.open(path)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(any_list(), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 5))
def test_lists_are_read_back_unchanged_and_absent_responses_have_length_zero(
    tmp_path_factory: pytest.TempPathFactory, lists: list[Example], shard_rows: int, rows_per_batch: int
) -> None:
    store = write_lists(tmp_path_factory.mktemp("store") / "s", lists, shard_rows, rows_per_batch)
    store.verify()
    width = max(len(each.responses) for each in lists)
    assert (store.kind, store.num_responses, store.lengths.shape) == ("lists", width, (len(lists), 1 + width))
    for number, example in enumerate(lists):
        assert_equal(store[number], canonical(example))
        absent = [0] * (width - len(example.responses))
        sizes = [len(response.ids) for response in example.responses]
        assert store.lengths[number].tolist() == [len(example.prompt_ids), *sizes, *absent]
        masked = [
            size if r.mask is None else int(r.mask.sum()) for size, r in zip(sizes, example.responses, strict=True)
        ]
        assert store.scored_lengths[number].tolist() == [*masked, *absent]
    order = np.arange(len(lists))[::-1]
    hashes = [hash_example(lists[number]).prompt for number in order]
    assert [bytes(each) for each in store.prompt_hashes(order)] == hashes


def make_list(seed: int) -> Example:
    rng = np.random.default_rng(seed)
    sides = (rng.integers(0, 50_000, rng.integers(1, 30)).astype(np.int32) for _ in range(rng.integers(2, 7)))
    values = sorted(rng.integers(0, 9, 9).tolist(), reverse=True)
    return Example(np.array([seed], np.int32), tuple(Response(each, None, values[at]) for at, each in enumerate(sides)))


def test_bytes_do_not_depend_on_when_the_longest_list_arrives_in_a_batch(tmp_path: Path) -> None:
    lists = [make_list(seed) for seed in range(23)]
    write_lists(tmp_path / "a", lists, 10, 23)
    write_lists(tmp_path / "b", lists, 10, 1)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_the_content_digest_covers_the_values(tmp_path: Path) -> None:
    lists = [make_list(seed) for seed in range(3)]
    other = replace(lists[1], responses=(lists[1].responses[0]._replace(value=99.0), *lists[1].responses[1:]))
    stores = [write_lists(tmp_path / f"{n}", each, 4, 2) for n, each in enumerate((lists, [lists[0], other, lists[2]]))]
    assert stores[0].digest != stores[1].digest
    assert write_lists(tmp_path / "shards", lists, 2, 1).digest == stores[0].digest


@pytest.mark.parametrize("is_pair", [True, False])
def test_the_prompt_hashes_of_a_store_and_of_a_split_are_those_of_its_shards(prepared: Any, is_pair: bool) -> None:
    pairs = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(20)]
    lists = [scored(f"q{n}", ("a", 2), ("b", 1)) for n in range(20)]
    full = prepared(*(pairs if is_pair else lists), shard_rows=6)
    for store in (full, *full.split(0.3, 0)):
        expected = np.concatenate(list(store.hashes("prompt_hash")))
        numbers = np.random.default_rng(0).permutation(len(store))
        assert np.array_equal(store.prompt_hashes(numbers), expected[numbers])


def test_all_responses_of_a_prompt_are_on_one_side_of_a_split(prepared: Any) -> None:
    store = prepared(*(labelled(f"q{n % 10}", f"a{n}", n % 2) for n in range(60)))
    train, held_out = store.split(0.3, 0)
    assert len(train) + len(held_out) == 60
    prompts = [{bytes(each) for each in side.prompt_hashes(np.arange(len(side)))} for side in (train, held_out)]
    assert not prompts[0] & prompts[1]
    assert {store[n].responses[0].value for n in range(60)} == {0.0, 1.0}


@pytest.mark.parametrize(
    "change",
    [{"kind": "trees"}, {"num_responses": 0}, {"num_responses": "3"}, {"num_responses": 9}, {"kind": "pairs"}],
)
def test_a_manifest_with_another_kind_or_width_is_damaged(prepared: Any, change: dict[str, Any]) -> None:
    store = prepared(scored("q", ("a", 2), ("b", 1)))
    manifest = json.loads((store.path / "manifest.json").read_text())
    (store.path / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(UserError, match=r"is damaged|has store format 2"):
        ExampleStore.open(store.path)


def long_lists(write_rows: WriteRows) -> str:
    """Lists that get longer in the course of the file, so the table of lengths is widened twice."""
    sizes = [2] * 900 + [4] * 700 + [3] * 500 + [6] * 900
    rows = [scored(f"q{n}?", *((f"a{at} {n}", at) for at in range(size))) for n, size in enumerate(sizes)]
    return write_rows(*rows)


@pytest.mark.parametrize("num_checkpoints", [1, 2, 4])
def test_an_interrupted_preparation_of_lists_gives_the_same_bytes(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows, num_checkpoints: int
) -> None:
    lists = DataSettings(long_lists(write_rows), shard_rows=1000)
    prepare(lists, chat_tokenizer, tmp_path / "uninterrupted")
    stop_after(num_checkpoints, lists, chat_tokenizer, tmp_path / "s", pairs_per_checkpoint=500)
    prepare(lists, chat_tokenizer, tmp_path / "s")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "uninterrupted")
    assert ExampleStore.open(tmp_path / "s").num_responses == 6


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_preparation_of_lists_gives_the_same_bytes(tmp_path: Path, write_rows: WriteRows) -> None:
    files = [long_lists(write_rows)]
    whole = kill_and_finish(tmp_path / "uninterrupted", tmp_path / "uninterrupted.log", "local:1", files, [])
    killed = kill_and_finish(tmp_path / "killed", tmp_path / "killed.log", "local:1", files, [3, 1])
    assert len(whole) < len(killed)
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "uninterrupted")
    assert ExampleStore.open(tmp_path / "killed").num_responses == 6


def test_a_crash_between_the_last_checkpoint_and_the_publication_of_lists_is_resumed(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thresher.data.store import writer as store_writer

    lists = DataSettings(long_lists(write_rows), shard_rows=500)
    prepare(lists, chat_tokenizer, tmp_path / "uninterrupted")
    with monkeypatch.context() as patch:
        patch.setattr(store_writer, "PAIRS_PER_CHECKPOINT", 500)
        patch.setattr(store_writer.durable, "write", lambda path, content: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(lists, chat_tokenizer, tmp_path / "s")
    assert (tmp_path / ".s.partial" / "content" / "lengths.bin").is_file()
    prepare(lists, chat_tokenizer, tmp_path / "s")
    assert files_of(tmp_path / "s") == files_of(tmp_path / "uninterrupted")


@pytest.mark.real
def test_the_kto_demo_of_llama_factory_has_both_labels(
    tmp_path: Path, stories_tokenizer: Any, shared_data: Path
) -> None:
    name = str(shared_data / "llama-factory" / "kto_en_demo.json")
    report = prepare(DataSettings(name, "raw", sequence_length=None), stories_tokenizer, tmp_path / "s")
    rows = json.loads(Path(name).read_text())
    store = ExampleStore.open(tmp_path / "s")
    assert (report.pairs_kept, report.desirable) == (len(rows), sum(row["label"] for row in rows))
    assert [store[n].responses[0].value for n in range(len(store))] == [float(row["label"]) for row in rows]


def test_scores_of_a_batch_are_those_of_its_rows_in_fp32() -> None:
    tokens, scores = np.zeros(1, np.int32), [1234.567, 0.1, -7.7]
    list_of_three = Example(tokens, tuple(Response(tokens, value=score) for score in scores))
    batch = ExampleBatch(np.arange(2), (list_of_three, replace(list_of_three, responses=list_of_three.responses[:2])))
    assert batch.values.tolist() == np.array([scores, [*scores[:2], 0.0]], np.float32).tolist()
