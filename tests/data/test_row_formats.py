"""Every row format gives the same kind of pair, and an unrecognized format is an error."""

from __future__ import annotations

from typing import Any

import pytest

from thresher.data.prepare.blocks import UnpairedJoiner
from thresher.data.rows.formats import PreferenceRow, detect_format, to_preference_row
from thresher.data.rows.messages import TextSegment
from thresher.data.rows.parsing import BadRowError
from thresher.errors import UserError


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def read(row: dict[str, Any], **keys: str) -> PreferenceRow:
    return to_preference_row(row, detect_format(row, keys, "rows.jsonl, line 1"), keys)


PROMPT = [user("Why?")]
GOOD, BAD = [assistant("Because.")], [assistant("No.")]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("prompt", {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}),
        ("prompt", {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD}),
        ("prompt", {"prompt": PROMPT, "chosen": "Because.", "rejected": "No."}),
        ("prompt", {"prompt": "Why?", "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD}),
        ("question", {"question": "Why?", "chosen": "Because.", "rejected": "No."}),
        ("question", {"question": PROMPT, "chosen": "Because.", "rejected": "No."}),
        ("prompt", {"question": "What?", "prompt": "Why?", "chosen": "Because.", "rejected": "No."}),
        ("whole_conversations", {"question": "What?", "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD}),
        ("messages", {"messages": PROMPT, "chosen": GOOD[0], "rejected": BAD[0]}),
        ("instruction", {"instruction": "Why?", "input": "", "output": "x", "chosen": "Because.", "rejected": "No."}),
        ("ranked_output", {"instruction": "Why?", "input": "", "output": ["Because.", "No."]}),
        (
            "conversations",
            {
                "conversations": [{"from": "human", "value": "Why?"}],
                "chosen": {"from": "gpt", "value": "Because."},
                "rejected": {"from": "gpt", "value": "No."},
            },
        ),
        ("whole_conversations", {"chosen": PROMPT + GOOD, "rejected": PROMPT + BAD}),
        (
            "context",
            {
                "context": [{"from": "user", "content": "Why?"}],
                "chosen": [{"from": "assistant", "content": "Because."}],
                "rejected": [{"from": "assistant", "content": "No."}],
            },
        ),
        ("whole_conversations", {"context": "a topic", "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD}),
        (
            "ranked_completions",
            {"context": PROMPT, "completions": [{"rank": 1, "completion": BAD}, {"rank": 0, "completion": GOOD}]},
        ),
        ("rejected_response", {"messages": PROMPT + GOOD, "rejected_response": "No."}),
        ("rejected_messages", {"messages": PROMPT + GOOD, "rejected_messages": PROMPT + BAD}),
        (
            "transcripts",
            {"chosen": "\n\nHuman: Why?\n\nAssistant: Because.", "rejected": "\n\nHuman: Why?\n\nAssistant: No."},
        ),
        ("openai", {"input": {"messages": PROMPT}, "preferred_output": GOOD, "non_preferred_output": BAD}),
        (
            "evals",
            {"question": "Why?", "answer_matching_behavior": "Because.", "answer_not_matching_behavior": "No."},
        ),
    ],
)
def test_every_format_gives_the_same_pair(name: str, row: dict[str, Any]) -> None:
    assert detect_format(row, {}, "here").name == name
    pair = read(row)
    assert (pair.prompt, *pair.responses) == (PROMPT, GOOD, BAD)


SYSTEM = {"role": "system", "content": "Be kind."}
HISTORY = [user("Hi"), assistant("Hello")]


@pytest.mark.parametrize(
    ("prompt", "start", "expected"),
    [
        ([SYSTEM, *PROMPT], PROMPT, [SYSTEM, *PROMPT]),
        ([*HISTORY, *PROMPT], PROMPT, [*HISTORY, *PROMPT]),
        ([SYSTEM, *HISTORY, *PROMPT], [*HISTORY, *PROMPT], [SYSTEM, *HISTORY, *PROMPT]),
        (PROMPT, [SYSTEM, *PROMPT], [SYSTEM, *PROMPT]),
        ([SYSTEM], PROMPT, [SYSTEM, *PROMPT]),
        (HISTORY, PROMPT, [*HISTORY, *PROMPT]),
        # the same text in other turns, which text alone would take for a repetition
        ([user("yes"), assistant("yes"), user("yes")], [user("yes")], [user("yes"), assistant("yes"), user("yes")]),
        (
            [{"role": "system", "content": "go"}, user("go")],
            [user("go")],
            [{"role": "system", "content": "go"}, user("go")],
        ),
        ("Why? \n", PROMPT, PROMPT),
        ("Why?", [*HISTORY, *PROMPT], [*HISTORY, *PROMPT]),
        ([SYSTEM, *PROMPT], [SYSTEM, *HISTORY, *PROMPT], [SYSTEM, *HISTORY, *PROMPT]),
        ("", PROMPT, PROMPT),
        ([SYSTEM, user("")], PROMPT, [SYSTEM, *PROMPT]),
    ],
)
def test_turns_that_both_the_prompt_and_the_conversations_contain_occur_once(prompt, start, expected) -> None:
    pair = read({"prompt": prompt, "chosen": start + GOOD, "rejected": start + BAD})
    assert (pair.prompt, *pair.responses) == (expected, GOOD, BAD)


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("How?", PROMPT),
        ([*HISTORY, *PROMPT], [user("Hi"), assistant("Bye"), *PROMPT]),
        ([user("Why?"), user("Hi")], [user("Hi?")]),
        ([{"role": "system", "content": "Be rude."}], [SYSTEM, *PROMPT]),
    ],
)
def test_a_prompt_that_differs_from_the_first_turns_of_the_conversations_is_a_bad_row(prompt, start) -> None:
    with pytest.raises(BadRowError, match="`prompt` differs from the first turns of `chosen` and `rejected`; make it"):
        read({"prompt": prompt, "chosen": start + GOOD, "rejected": start + BAD})


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        (PROMPT + GOOD, PROMPT, "`rejected` has no assistant turn"),
        (PROMPT, PROMPT + BAD, "`chosen` has no assistant turn"),
        (PROMPT + GOOD, [user("How?"), *BAD], "share no prompt: they differ before the first assistant turn"),
    ],
)
def test_conversations_next_to_a_prompt_that_are_no_pair_state_the_reason(chosen, rejected, reason) -> None:
    with pytest.raises(BadRowError, match=reason):
        read({"prompt": "Why?", "chosen": chosen, "rejected": rejected})


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_text_in_a_column_of_messages_is_a_bad_row(column) -> None:
    with pytest.raises(BadRowError, match=f"`{column}` must be a list of messages, got text"):
        read({column: "hello", "chosen": "Because.", "rejected": "No."})


def test_a_ranked_output_has_two_answers() -> None:
    with pytest.raises(BadRowError, match=r"`output` must be a list of \[chosen, rejected\]"):
        read({"instruction": "Why?", "output": ["Because."]})


@pytest.mark.parametrize(
    ("scores", "contradict"),
    [
        ({"score_chosen": 4, "score_rejected": 5.5}, True),
        ({"chosen_score": "4", "rejected_score": "5.5"}, True),
        ({"chosen_rating": 5, "rejected_rating": 5}, False),
        ({"score_chosen": 5, "score_rejected": 4}, False),
        ({"score_chosen": None, "score_rejected": "high"}, False),
        ({"score_rejected": 4}, False),
    ],
)
def test_scores_contradict_the_labels_if_that_of_the_rejected_response_is_higher(scores, contradict) -> None:
    assert read({"prompt": "Why?", "chosen": "Because.", "rejected": "No.", **scores}).scores_contradict is contradict


def test_input_is_appended_to_the_prompt() -> None:
    pair = read({"instruction": "Correct it.", "input": "freind", "output": "o", "chosen": "a", "rejected": "b"})
    assert pair.prompt == [user("Correct it.\n\nfreind")]


def test_system_tools_margin_and_weight_are_read() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    row = {"prompt": "Why?", "chosen": "a", "rejected": "b", "system": "Be kind.", "margin": 0.5, "weight": "2"}
    pair = read({**row, "tools": tools})
    assert pair.prompt[0] == {"role": "system", "content": "Be kind."}
    assert (pair.margin, pair.weight, pair.tools) == (0.5, 2.0, tools)
    assert read({**row, "tools": '[{"type": "function"}]'}).tools == [{"type": "function"}]


def test_columns_named_by_the_user_replace_standard_columns() -> None:
    row = {"question": "Why?", "prompt": "x", "better": "Because.", "worse": "No.", "chosen": "y", "rejected": "z"}
    pair = read(row, prompt="question", chosen="better", rejected="worse")
    assert (pair.prompt, *pair.responses) == (PROMPT, GOOD, BAD)


def test_thinking_and_tool_calls_stay_in_their_messages() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "name": None}
    pair = read({"prompt": "Why?", "chosen": [call], "rejected": [{**GOOD[0], "thinking": "hm"}]})
    assert pair.responses[0] == [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]
    assert pair.responses[1] == [{**GOOD[0], "thinking": "hm"}]


def test_text_parts_of_a_message_are_concatenated() -> None:
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "cause."}]
    row = read({"prompt": PROMPT, "chosen": [{"role": "assistant", "content": parts}], "rejected": BAD})
    assert row.responses[0] == GOOD


def test_history_precedes_the_instruction() -> None:
    pair = read({"instruction": "And?", "history": [["Why?", "Because."]], "chosen": "a", "rejected": "b"})
    assert pair.prompt == [*PROMPT, *GOOD, user("And?")]


@pytest.mark.parametrize("turn", [["Why?"], ["Why?", "Because.", "So?"], "Why?"])
def test_a_turn_of_the_history_has_a_question_and_an_answer(turn) -> None:
    with pytest.raises(BadRowError, match=r"`history` must be a list of \[question, answer\]"):
        read({"instruction": "And?", "history": [turn], "chosen": "a", "rejected": "b"})


def test_a_system_message_that_conversations_do_not_repeat_is_kept() -> None:
    system = {"role": "system", "content": "Be kind."}
    pair = read({"prompt": [system, *PROMPT], "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD})
    assert pair.prompt[0] == system


def test_a_transcript_keeps_its_text_and_splits_at_the_first_answer_that_differs() -> None:
    start = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: Why?\n\nAssistant:"
    pair = read({"chosen": f"{start} Because.", "rejected": f"{start} No.\n\nHuman: oh\n\nAssistant: Yes."})
    assert pair.plain is not None
    assert pair.plain.prompt == start
    assert pair.plain.responses[0] == (TextSegment(" Because."),)
    assert pair.plain.responses[1] == (
        TextSegment(" No."),
        TextSegment("\n\nHuman:", scored=False),
        TextSegment(" oh", scored=False),
        TextSegment("\n\nAssistant:", scored=False),
        TextSegment(" Yes."),
    )
    assert pair.responses[1] == [assistant("No."), user("oh"), assistant("Yes.")]


def test_consecutive_turns_of_one_speaker_become_one_message() -> None:
    start = "\n\nHuman: Why?\n\nAssistant:"
    pair = read({"chosen": f"{start} Because.\n\nAssistant: Really.", "rejected": f"{start} No."})
    assert pair.responses[0] == [assistant("Because.\n\nReally.")]


def test_equal_conversations_still_have_a_response() -> None:
    pair = read({"chosen": PROMPT + GOOD, "rejected": PROMPT + GOOD})
    assert (pair.prompt, *pair.responses) == (PROMPT, GOOD, GOOD)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "p", "chosen": "a"}, "no value for rejected"),
        ({"prompt": "p", "chosen": "a", "rejected": 3}, "`rejected` must be text or messages, got int"),
        ({"prompt": "p", "chosen": [{"role": "judge", "content": "a"}], "rejected": BAD}, "unknown role 'judge'"),
        ({"prompt": "p", "chosen": [{"content": "a"}], "rejected": BAD}, "has no role; its keys are content"),
        ({"prompt": "p", "chosen": GOOD, "rejected": [assistant("a"), user("b")]}, "got assistant, user"),
        ({"prompt": "p", "chosen": GOOD, "rejected": []}, "`rejected` has no messages"),
        ({"prompt": [], "chosen": GOOD, "rejected": BAD}, "the prompt has no messages"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "weight": -1}, "`weight` must not be negative"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "much"}, "`margin` must be a number, got 'much'"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": float("nan")}, "`margin` must be a finite number"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "tools": "{"}, "`tools` is text but not JSON"),
        (
            {"prompt": "p", "chosen": [{"role": "assistant", "content": [{"type": "image"}]}], "rejected": BAD},
            "content that is not text",
        ),
    ],
)
def test_a_bad_row_states_the_reason(row: dict[str, Any], reason: str) -> None:
    row_format = detect_format({"prompt": "p", "chosen": "a", "rejected": "b"}, {}, "here")
    with pytest.raises(BadRowError, match=reason):
        to_preference_row(row, row_format, {})


def test_conversations_without_a_shared_prompt_are_bad_rows() -> None:
    with pytest.raises(BadRowError, match="share no prompt"):
        read({"chosen": [user("a"), *GOOD], "rejected": [user("b"), *BAD]})


def test_an_unrecognized_format_lists_columns_formats_and_the_nearest_key() -> None:
    with pytest.raises(UserError) as error:
        detect_format({"prompt": "p", "choosen": "a", "reject": "b"}, {}, "rows.jsonl, line 1")
    message = str(error.value)
    assert message.startswith("rows.jsonl, line 1: unrecognized row format with columns prompt, choosen, reject: ")
    assert "no chosen or rejected column. Name your columns with chosen_key=choosen rejected_key=reject" in message
    assert "  instruction: instruction, chosen, rejected" in message


@pytest.mark.parametrize(("other", "key"), [({"id": 1}, "COLUMN"), ({"prompt": None}, "prompt")])
def test_a_missing_prompt_column_is_named(other: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"no prompt column. Name your columns with prompt_key={key},"):
        detect_format({"chosen": "a", "rejected": "b", **other}, {}, "here")


def test_a_key_that_names_no_column_is_an_error() -> None:
    row = {"prompt": "p", "better": "a", "worse": "b"}
    with pytest.raises(UserError, match=r"chosen_key='beter' names no column; .* did you mean 'better'"):
        detect_format(row, {"chosen": "beter", "rejected": "worse"}, "here")


def test_labelled_rows_of_one_prompt_are_joined_in_order() -> None:
    joiner = UnpairedJoiner()
    row_format = detect_format({"prompt": "p", "completion": "c", "label": True}, {}, "here")
    answers = [
        ("p", "good 1", True),
        ("q", "bad", False),
        ("p", "good 2", "true"),
        ("p", "bad 1", 0),
        ("p", "bad 2", 0),
    ]
    rows = [joiner.join({"prompt": p, "completion": c, "label": label}, row_format) for p, c, label in answers]
    assert rows[:3] == [None, None, None]
    assert rows[3] == {"prompt": "p", "chosen": "good 1", "rejected": "bad 1"}
    assert rows[4] == {"prompt": "p", "chosen": "good 2", "rejected": "bad 2"}
    assert joiner.num_waiting == 1


@pytest.mark.parametrize(("column", "one", "other"), [("system", "Be kind.", "Be brief."), ("tools", "[1]", "[2]")])
def test_labelled_rows_with_another_system_prompt_or_tools_are_not_joined(column, one, other) -> None:
    joiner = UnpairedJoiner()
    row = {"messages": PROMPT + GOOD, "label": True, column: one}
    row_format = detect_format(row, {}, "here")
    assert joiner.join(row, row_format) is None
    assert joiner.join({"messages": PROMPT + BAD, "label": False, column: other}, row_format) is None
    assert joiner.num_waiting == 2
    joined = joiner.join({"messages": PROMPT + BAD, "label": False, column: one}, row_format)
    assert joined == {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD, column: one}


def test_labelled_messages_split_before_the_last_answer() -> None:
    joiner = UnpairedJoiner()
    row_format = detect_format({"messages": PROMPT + GOOD, "label": True}, {}, "here")
    assert joiner.join({"messages": PROMPT + GOOD, "label": True}, row_format) is None
    joined = joiner.join({"messages": PROMPT + BAD, "label": False}, row_format)
    assert joined == {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD}
    with pytest.raises(BadRowError, match="`label` must be true or false, got 'perhaps'"):
        joiner.join({"messages": PROMPT + BAD, "label": "perhaps"}, row_format)


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ([{"rank": 0, "completion": GOOD}], r"two completions with different ranks, got ranks \[0\]"),
        ([{"rank": 1, "completion": GOOD}, {"rank": 1, "completion": BAD}], r"got ranks \[1, 1\]"),
        (["No."], "a list of objects with `rank` and `completion`"),
        ([{"rank": 0, "completion": GOOD}, {"rank": 1}], "`rejected` must be text or messages, got "),
    ],
)
def test_ranked_completions_other_than_two_are_a_bad_row(completions, message):
    with pytest.raises(BadRowError, match=message):
        read({"context": PROMPT, "completions": completions})
