"""Row formats: detect the format of a file from its first row, and read rows of it as `PreferenceRow`s.

Rendering and tokenization are left to `tokenization`. With `join_labelled`, rows with a label are joined to pairs
before they are read.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from thresher.data.example import SUBSET_BYTES, StoredKind
from thresher.data.rows.messages import (
    SYSTEM_ROLES,
    Message,
    TextSegment,
    is_empty,
    is_transcript,
    parse_transcript,
    split_shared_prefix,
    to_messages,
    to_tools,
)
from thresher.data.rows.parsing import BadRowError, Row, decode_json, quoted
from thresher.errors import UserError, nearest

# rendering is quadratic: each assistant message is rendered with all messages before it
MAX_MESSAGES = 1000
# the lengths of all examples are stored in a table as wide as the longest list
MAX_RESPONSES = 256
_LARGEST_NUMBER = float(np.finfo(np.float32).max)
_MAX_NAMES = 40
# variables of the chat template: TRL's name and the config's
_ARGUMENTS = ("chat_template_kwargs", "template_arguments")
# of the chosen and the rejected response, as UltraFeedback and others name them
_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating"))
_SCORE_NAMES = tuple(name for names in _SCORES for name in names)
# of a list of responses: in each of them, or in a column with one number for each
_LIST_SCORES = ("overall_score", "score", "rating", "reward", "rank")
_LIST_TEXTS = ("completion", "response", "text", "answer", "content", "output")
_OPTIONAL = ("system", "tools", "margin", "weight", *_ARGUMENTS, *_SCORE_NAMES)


@dataclass(frozen=True)
class PlainText:
    """The exact text of a row for `template=raw`, where messages lose some of it; the text is prompt + segments."""

    prompt: str
    responses: tuple[tuple[TextSegment, ...], ...]


@dataclass(frozen=True)
class PreferenceRow:
    """One example before tokenization."""

    prompt: list[Message]
    # of each the messages after the prompt; the first and the last are from the assistant
    responses: tuple[list[Message], ...]
    values: tuple[float, ...] = ()  # a label or a score of each response, none in pairs
    tools: list[dict[str, Any]] | None = None
    plain: PlainText | None = None
    weight: float = 1.0
    margin: float = 0.0
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # of this row
    scores_contradict: bool = False  # the rejected response has the higher score


@dataclass(frozen=True)
class RowFormat:
    """The columns of a row and how to read them; rows of token ids by `read_tokenized`."""

    name: str
    required: tuple[str, ...]
    read: Callable[[Row], PreferenceRow]
    optional: tuple[str, ...] = _OPTIONAL
    matches: Callable[[Row], bool] = lambda row: True  # whether the values have the types of this format
    is_tokenized: bool = False
    kind: StoredKind = "pairs"

    @property
    def is_labelled(self) -> bool:
        return "label" in self.required


def _read_instruction(row: Row) -> PreferenceRow:
    return _pair(row, _instruction(row), _side(row, "chosen"), _side(row, "rejected"))


def _instruction(row: Row) -> list[Message]:
    return [*_history(row.get("history")), {"role": "user", "content": _with_input(row, _text(row, "instruction"))}]


def _read_ranked_output(row: Row) -> PreferenceRow:
    """LLaMA-Factory's earlier ranking data: both answers are in `output`, the chosen one first."""
    output = row["output"]
    if not isinstance(output, list) or len(output) != 2:
        raise BadRowError("`output` must be a list of [chosen, rejected]")
    return _read_instruction({**row, "chosen": output[0], "rejected": output[1]})


def _history(value: Any) -> list[Message]:
    if value is None or value == "":
        return []
    if not isinstance(value, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in value):
        raise BadRowError("`history` must be a list of [question, answer]")
    if not all(isinstance(text, str) for turn in value for text in turn):
        raise BadRowError("`history` must contain only text")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in value for role, text in zip(roles, turn, strict=True)]


def _read_prompt(row: Row) -> PreferenceRow:
    column = next(name for name in ("prompt", "messages", "conversations") if row.get(name) is not None)
    value, chosen, rejected = row[column], row.get("chosen"), row.get("rejected")
    if isinstance(value, str):
        if column != "prompt":
            raise BadRowError(f"`{column}` must be a list of messages, got text")
        value = _with_input(row, value)
        if isinstance(chosen, str) and isinstance(rejected, str):
            return _read_texts(row, value, [chosen, rejected])
    prompt = to_messages(value, "user", column)
    sides = _side(row, "chosen"), _side(row, "rejected")
    if sides[0] and sides[0][0]["role"] != "assistant":
        shared = split_shared_prefix(*sides)
        prompt = _join_conversations(prompt, sides[0][:shared], column)
        sides = sides[0][shared:], sides[1][shared:]
    return _pair(row, prompt, *sides)


def _join_conversations(prompt: list[Message], prefix: list[Message], column: str) -> list[Message]:
    """Put a prompt before the start of full conversations, which repeat it, or its last turns, or follow it."""
    prompt = [message for message in prompt if not is_empty(message)]
    asked, shared = ([(each["role"], each["content"].strip()) for each in side] for side in (prompt, prefix))
    turns = iter(shared)
    if all(turn in turns for turn in asked):  # `in` consumes the iterator, so the turns are in this order
        return prefix
    # turns at the end of the prompt with which the conversation begins
    lengths = range(min(len(asked), len(shared), MAX_MESSAGES), 0, -1)
    overlap = next((length for length in lengths if asked[-length:] == shared[:length]), 0)
    if not overlap and (asked[-1][0] == "user" or shared[0][0] in SYSTEM_ROLES):
        raise BadRowError(
            f"`{column}` differs from the first turns of `chosen` and `rejected`; make it equal to them, or remove it"
        )
    return prompt[: len(prompt) - overlap] + prefix


def _read_prompt_in(column: str) -> Callable[[Row], PreferenceRow]:
    return lambda row: _read_prompt({**row, "prompt": row[column]})


def _read_ranked(row: Row) -> PreferenceRow:
    """NeMo-RL: two completions with ranks, of which the lower is better."""
    completions = row["completions"]
    if not isinstance(completions, list) or not all(isinstance(each, dict) for each in completions):
        raise BadRowError("`completions` must be a list of objects with `rank` and `completion`")
    ranks = [each.get("rank") for each in completions]
    if len(set(ranks)) != 2 or len(ranks) != 2 or not all(isinstance(rank, int) for rank in ranks):
        raise BadRowError(f"`completions` must have two completions with different ranks, got ranks {ranks}")
    better, worse = sorted(completions, key=lambda each: each["rank"])
    sides = {"chosen": better.get("completion"), "rejected": worse.get("completion")}
    prompt = to_messages(row["context"], "user", "context")
    return _pair(row, prompt, _side(sides, "chosen"), _side(sides, "rejected"))


def _read_rejected_answer(row: Row) -> PreferenceRow:
    """ms-swift: the last turn of `messages` is the chosen answer, `rejected_response` the rejected one."""
    messages = to_messages(row["messages"], "user", "messages")
    return _pair(row, messages[:-1], messages[-1:], _side(row, "rejected_response"))


def _read_rejected_messages(row: Row) -> PreferenceRow:
    """ms-swift: `messages` is the chosen conversation, `rejected_messages` the rejected one."""
    return _read_conversations({**row, "chosen": row["messages"], "rejected": row["rejected_messages"]})


def _read_rejected_answers(row: Row) -> PreferenceRow:
    """ms-swift: the same with several rejected answers."""
    messages, rejected = to_messages(row["messages"], "user", "messages"), row["rejected_response"]
    if not isinstance(rejected, list):
        raise BadRowError("`rejected_response` must be a list, as in the first row")
    values = (1.0, *(0.0 for _ in rejected))
    return _read_responses(row, messages[:-1], [messages[-1:], *rejected], values)


def _read_ranked_outputs(row: Row) -> PreferenceRow:
    """LLaMA-Factory's earlier ranking data with more than two answers, the best first."""
    output = row["output"]
    if not isinstance(output, list):
        raise BadRowError("`output` must be a list of answers, as in the first row")
    return _read_responses(row, _instruction(row), output, tuple(float(-rank) for rank in range(len(output))))


def _read_list(prompt: str, column: str) -> Callable[[Row], PreferenceRow]:
    def read(row: Row) -> PreferenceRow:
        items = row[column]
        if not isinstance(items, list) or not items:
            raise BadRowError(f"`{column}` must be a list of responses")
        # `scores` first: it may be the column that scores_key names
        columns = (f"{name}s" for name in ("score", *_LIST_SCORES))
        name = next((name for name in columns if row.get(name) is not None), None)
        scored: Any = items if name is None else row[name]
        if not isinstance(scored, list) or len(scored) != len(items):
            raise BadRowError(f"`{name}` must be a list with a number for each response of `{column}`")
        scored = scored if name is None else [{name[:-1]: each} for each in scored]
        key = _score_key(scored, column)
        values = [_score(each, key) for each in scored]
        order = sorted(range(len(items)), key=lambda at: -values[at])
        responses = [_response(items[at], column) for at in order]
        asked = _instruction(row) if prompt == "instruction" else row[prompt]
        return _read_responses(row, asked, responses, tuple(values[at] for at in order), prompt)

    return read


def _score_key(items: list[Any], column: str) -> str:
    """Return the key of the scores or ranks that all responses of a row have: 1 to 10 and 1st to 10th do not mix."""
    present = [
        {key for key in _LIST_SCORES if isinstance(each, dict) and each.get(key) not in (None, "")} for each in items
    ]
    shared = set.intersection(*present)
    if not shared and any(present):
        found = " or ".join(key for key in _LIST_SCORES if any(key in each for each in present))
        raise BadRowError(f"not every response of `{column}` has a number `{found}`; write the same key into each")
    if not shared:
        raise BadRowError(
            f"a response of `{column}` has no score; write {', '.join(_LIST_SCORES[:-1])} or rank into each, or a "
            "column `scores` or `ranks` with a list of numbers"
        )
    return next(key for key in _LIST_SCORES if key in shared)


def _score(item: Any, key: str) -> float:
    """Return a score, or a negative rank: the higher is better."""
    number = float(np.float32(_number(item, key, 0.0)))  # as it is stored
    return 0.0 - number if key == "rank" else number


def _response(item: Any, column: str) -> Any:
    if not isinstance(item, dict) or "role" in item or "from" in item:
        return item
    name = next((name for name in _LIST_TEXTS if item.get(name) is not None), None)
    if name is None:
        raise BadRowError(f"a response of `{column}` has no text; name it {', '.join(_LIST_TEXTS[:-1])} or output")
    return item[name]


def _read_answer(column: str, *, labelled: bool) -> Callable[[Row], PreferenceRow]:
    def read(row: Row) -> PreferenceRow:
        if not labelled and row.get("label") is not None:
            raise BadRowError("the row has a `label`, and the first row of the file has none; give each row one")
        prompt, answer = split_answer(row, column)
        return _read_responses(row, prompt, [answer], (float(not labelled or read_label(row["label"])),), column)

    return read


def split_answer(row: Row, column: str) -> tuple[Any, Any]:
    """Return the prompt in `column` and the answer, which ends the conversation or has its own column."""
    if column == "prompt":
        return row["prompt"], row["completion"]
    if column == "instruction":
        return _instruction(row), row["output"]
    messages = to_messages(row[column], "user", column)
    end = len(messages)
    while end > 0 and messages[end - 1]["role"] == "assistant":
        end -= 1
    if end in (0, len(messages)):
        raise BadRowError(f"`{column}` must have a prompt and end with an assistant turn")
    return messages[:end], messages[end:]


def read_label(value: Any) -> bool:
    """Read a label: true for a desirable answer."""
    label = {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())
    if label is None:
        raise BadRowError(f"`label` must be true or false, got {quoted(value)}")
    return label


def _read_responses(
    row: Row, prompt: Any, responses: Sequence[Any], values: tuple[float, ...], column: str = "prompt"
) -> PreferenceRow:
    if isinstance(prompt, str) and all(isinstance(each, str) for each in responses):
        return _read_texts(row, prompt, responses, values)
    sides = tuple(to_messages(each, "assistant", f"response {at + 1}") for at, each in enumerate(responses))
    return _to_row(row, to_messages(prompt, "user", column), sides, values)


def _read_texts(row: Row, prompt: str, texts: Sequence[str], values: tuple[float, ...] = ()) -> PreferenceRow:
    if is_transcript(prompt) and prompt.rstrip().endswith("\n\nAssistant:"):
        messages = parse_transcript(prompt, "prompt").messages[:-1]
    else:
        messages = [{"role": "user", "content": prompt}]
    system = _text(row, "system", "")
    plain = PlainText(f"{system}\n\n{prompt}" if system else prompt, tuple((TextSegment(text),) for text in texts))
    return _to_row(row, messages, tuple(to_messages(text, "assistant", "text") for text in texts), values, plain)


def _read_transcripts(row: Row) -> PreferenceRow:
    chosen = parse_transcript(_text(row, "chosen"), "chosen")
    rejected = parse_transcript(_text(row, "rejected"), "rejected")
    turn = split_shared_prefix(chosen.messages, rejected.messages)
    segments = chosen.segments_from(turn), rejected.segments_from(turn)
    plain = PlainText(chosen.text[: chosen.offsets[turn][1]], segments)
    return _pair(row, chosen.messages[:turn], chosen.messages[turn:], rejected.messages[turn:], plain)


def _read_conversations(row: Row) -> PreferenceRow:
    chosen, rejected = _side(row, "chosen"), _side(row, "rejected")
    shared = split_shared_prefix(chosen, rejected)
    return _pair(row, chosen[:shared], chosen[shared:], rejected[shared:])


def _read_openai(row: Row) -> PreferenceRow:
    request = row["input"]
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise BadRowError("`input` must be an object with `messages`")
    tools = {"tools": request["tools"]} if request.get("tools") and not row.get("tools") else {}
    return _pair(
        {**row, **tools},
        to_messages(request["messages"], "user", "input"),
        _side(row, "preferred_output"),
        _side(row, "non_preferred_output"),
    )


def _read_evals(row: Row) -> PreferenceRow:
    question = _text(row, "question")
    chosen, rejected = _text(row, "answer_matching_behavior"), _text(row, "answer_not_matching_behavior")
    return _read_texts(row, question, [chosen, rejected])


def _not_read(row: Row) -> PreferenceRow:
    raise AssertionError(f"rows with columns {sorted(row)} have token ids instead of text")


def _has(column: str, *types: type) -> Callable[[Row], bool]:
    return lambda row: isinstance(row[column], types)


def _has_more(column: str, length: int) -> Callable[[Row], bool]:
    return lambda row: isinstance(row[column], list) and len(row[column]) > length


def _list_format(name: str, prompt: str, column: str, least: int = 0) -> RowFormat:
    optional = (*_WITH_HISTORY, *(f"{score}s" for score in _LIST_SCORES))
    return RowFormat(
        name, (prompt, column), _read_list(prompt, column), optional, _has_more(column, least), kind="lists"
    )


def _answer_formats(labelled_name: str, answered_name: str, *required: str) -> tuple[RowFormat, RowFormat]:
    """Rows with an answer and a label, called `kto_tag` in LLaMA-Factory; and rows without a label, all desirable."""
    optional = _WITH_HISTORY if required[0] == "instruction" else _OPTIONAL
    labelled, answer = (_read_answer(required[0], labelled=labelled) for labelled in (True, False))

    def has_one_answer(row: Row) -> bool:
        return row.get("rejected") is None

    return (
        RowFormat(labelled_name, (*required, "label"), labelled, (*optional, "kto_tag"), has_one_answer, kind="labels"),
        # a null label in the first row does not make all rows desirable
        RowFormat(
            answered_name,
            required,
            answer,
            optional,
            lambda row: "label" not in row and has_one_answer(row),
            kind="labels",
        ),
    )


_SIDES = ("chosen", "rejected")
_WITH_HISTORY = ("input", "history", *_OPTIONAL)
_TOKENIZED = tuple(f"{side}_{name}" for side in _SIDES for name in ("input_ids", "loss_mask"))
_WITH_TOKENIZED = (*(f"{side}_attention_mask" for side in _SIDES), "margin", "weight", *_SCORE_NAMES)
# in order of priority: the first format whose required columns are all present is used
FORMATS = (
    RowFormat(
        "tokenized_weights",
        (*_TOKENIZED, *(f"{side}_token_weights" for side in _SIDES)),
        _not_read,
        _WITH_TOKENIZED,
        is_tokenized=True,
        kind="weighted_pairs",
    ),
    RowFormat("tokenized", _TOKENIZED, _not_read, _WITH_TOKENIZED, is_tokenized=True),
    RowFormat("openai", ("input", "preferred_output", "non_preferred_output"), _read_openai),
    RowFormat("evals", ("question", "answer_matching_behavior", "answer_not_matching_behavior"), _read_evals),
    RowFormat("instruction", ("instruction", *_SIDES), _read_instruction, _WITH_HISTORY),
    # a text is an answer without a rejected one
    RowFormat(
        "ranked_outputs",
        ("instruction", "output"),
        _read_ranked_outputs,
        _WITH_HISTORY,
        _has_more("output", 2),
        kind="lists",
    ),
    RowFormat("ranked_output", ("instruction", "output"), _read_ranked_output, _WITH_HISTORY, _has("output", list)),
    RowFormat("prompt", ("prompt", *_SIDES), _read_prompt, ("input", *_OPTIONAL)),
    RowFormat("messages", ("messages", *_SIDES), _read_prompt),
    RowFormat("conversations", ("conversations", *_SIDES), _read_prompt),
    # ColossalChat: the turns before the answers; in other formats, a text that is not read
    RowFormat("context", ("context", *_SIDES), _read_prompt_in("context"), matches=_has("context", list)),
    _list_format("context_completions", "context", "completions", 2),
    RowFormat("ranked_completions", ("context", "completions"), _read_ranked),
    _list_format("completions", "prompt", "completions"),
    _list_format("instruction_completions", "instruction", "completions"),
    _list_format("message_completions", "messages", "completions"),
    _list_format("responses", "prompt", "responses"),
    _list_format("answers", "prompt", "answers"),
    RowFormat(
        "rejected_responses",
        ("messages", "rejected_response"),
        _read_rejected_answers,
        matches=_has("rejected_response", list),
        kind="lists",
    ),
    RowFormat("rejected_response", ("messages", "rejected_response"), _read_rejected_answer),
    RowFormat("rejected_messages", ("messages", "rejected_messages"), _read_rejected_messages),
    RowFormat("transcripts", _SIDES, _read_transcripts, matches=lambda row: is_transcript(row["chosen"])),
    RowFormat("whole_conversations", _SIDES, _read_conversations, matches=_has("chosen", list, dict)),
    # after the formats of whole conversations, which may have a column `question` that they do not read
    RowFormat("question", ("question", *_SIDES), _read_prompt_in("question"), ("input", *_OPTIONAL)),
    # these last: a row with a rejected side does not have one answer
    *_answer_formats("labelled_completions", "answered_completions", "prompt", "completion"),
    *_answer_formats("labelled_messages", "answered_messages", "messages"),
    *_answer_formats("labelled_conversations", "answered_conversations", "conversations"),
    *_answer_formats("labelled_instructions", "answered_instructions", "instruction", "output"),
)
FORMAT_BY_NAME = {row_format.name: row_format for row_format in FORMATS}


def detect_format(row: Row, column_names: Mapping[str, str], where: str) -> RowFormat:
    """Detect the format of a file from its first row; `where` is its file and line."""
    for name, column in column_names.items():
        if column not in row:
            meant = nearest(column, map(str, list(row)[:_MAX_NAMES]))
            hint = f"; did you mean {meant!r}?" if meant else ""
            raise UserError(f"{where}: {name}_key={column!r} names no column; the columns are {_names(row)}{hint}")
    row = rename(row, column_names)
    present = {name for name, value in row.items() if value is not None}
    for row_format in FORMATS:
        required = set(row_format.required)
        # a format that ignores a column named by the user cannot be the intended one
        known = required.union(row_format.optional)
        if set(column_names) <= known and required <= present and row_format.matches(row):
            return row_format
    raise UserError(_unrecognized(row, where))


def _unrecognized(row: Row, where: str) -> str:
    missing = [name for name in ("chosen", "rejected", "prompt") if name not in row]
    if {"chosen", "rejected"} <= set(row):
        missing = ["prompt"]
    hints = []
    for name in missing:
        similar = difflib.get_close_matches(name, [str(column) for column in row][:_MAX_NAMES], n=1, cutoff=0.5)
        hints.append(f"{name}_key={similar[0] if similar else 'COLUMN'}")
    known = "\n".join(f"  {row_format.name}: {', '.join(row_format.required)}" for row_format in FORMATS)
    return (
        f"{where}: unrecognized row format with columns {_names(row)}: no {' or '.join(missing)} column. "
        f"Name your columns with {' '.join(hints)}, or use one of these formats:\n{known}"
    )


def _names(row: Row) -> str:
    more = f" and {len(row) - _MAX_NAMES} more" if len(row) > _MAX_NAMES else ""
    return (", ".join(str(name)[:_MAX_NAMES] for name in list(row)[:_MAX_NAMES]) or "(none)") + more


def rename(row: Row, column_names: Mapping[str, str]) -> Row:
    """Rename columns to their standard names; `column_names` maps standard names to the user's."""
    if "kto_tag" in row and "label" not in row:
        row = {**row, "label": row["kto_tag"]}
    if not column_names:
        return row
    # a column that already has the standard name is replaced by the one that the user named
    kept = {name: value for name, value in row.items() if name not in column_names}
    return {**kept, **{name: row[column] for name, column in column_names.items() if column in row}}


def to_preference_row(row: Row, row_format: RowFormat, column_names: Mapping[str, str]) -> PreferenceRow:
    """Read a row in the format of its file, or raise `BadRowError`."""
    row = rename(row, column_names)
    check_columns(row, row_format, column_names)
    read = row_format.read(row)
    if len(read.responses) > MAX_RESPONSES:
        raise BadRowError(f"{len(read.responses)} responses; the limit is {MAX_RESPONSES}")
    for number, side in enumerate(read.responses):
        name = ("chosen", "rejected")[number] if row_format.kind == "pairs" else f"response {number + 1}"
        if not side:
            raise BadRowError(f"`{name}` has no messages")
        if len(side) > MAX_MESSAGES:
            raise BadRowError(f"`{name}` has {len(side)} messages; the limit is {MAX_MESSAGES}")
        roles = [message["role"] for message in side]
        if roles[0] != "assistant" or roles[-1] != "assistant":
            raise BadRowError(f"`{name}` must begin and end with an assistant turn, got {', '.join(roles)}")
    if not read.prompt:
        raise BadRowError("the prompt has no messages")
    return read


def with_system(row: PreferenceRow, system: str | None) -> PreferenceRow:
    """Add a system message to a row that has none."""
    if not system or row.prompt[0]["role"] == "system":
        return row
    plain = row.plain and replace(row.plain, prompt=f"{system}\n\n{row.plain.prompt}")
    return replace(row, prompt=[{"role": "system", "content": system}, *row.prompt], plain=plain)


def check_columns(row: Row, row_format: RowFormat, column_names: Mapping[str, str]) -> None:
    """Raise `BadRowError` if a required column has no value."""
    missing = [column_names.get(name, name) for name in row_format.required if row.get(name) is None]
    if missing:
        raise BadRowError(f"no value for {', '.join(missing)}; its columns are {_names(row)}")


def read_numbers(row: Row) -> tuple[float, float]:
    """Read the weight and the margin of a row."""
    weight, margin = _number(row, "weight", 1.0), _number(row, "margin", 0.0)
    if weight < 0:
        raise BadRowError(f"`weight` must not be negative, got {weight}")
    return weight, margin


def read_subset(row: Row, column: str) -> str:
    """Read the name of a row's subset, which becomes part of the names of metrics."""
    if row.get(column) is None:
        raise BadRowError(f"no value for {column}, which names the subset; its columns are {_names(row)}")
    value = row[column]
    text = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not 0 < len(text.encode()) <= SUBSET_BYTES:
        raise BadRowError(f"`{column}` must name a subset in at most {SUBSET_BYTES} bytes, got {quoted(value)}")
    return re.sub(r"[^\w .:-]", "_", text, flags=re.ASCII)  # trackers accept these in names


def read_order(row: Row, column: str) -> float:
    """Read the number by which a curriculum sorts."""
    if row.get(column) is None:
        raise BadRowError(f"no value for {column}, by which the curriculum sorts; its columns are {_names(row)}")
    return _number(row, column, 0.0)


def _pair(
    row: Row, prompt: list[Message], chosen: list[Message], rejected: list[Message], plain: PlainText | None = None
) -> PreferenceRow:
    return _to_row(row, prompt, (chosen, rejected), (), plain)


def _to_row(
    row: Row,
    prompt: list[Message],
    responses: tuple[list[Message], ...],
    values: tuple[float, ...],
    plain: PlainText | None = None,
) -> PreferenceRow:
    system = _text(row, "system", "")
    if system and prompt and prompt[0]["role"] == "system":
        if prompt[0]["content"] != system:
            raise BadRowError("`system` conflicts with the prompt's system message; keep one")
    elif system:
        prompt = [{"role": "system", "content": system}, *prompt]
    tools, arguments = to_tools(row.get("tools")), _template_arguments(row)
    contradicts = not values and (_score_difference(row) or 0.0) < 0.0
    return PreferenceRow(prompt, responses, values, tools, plain, *read_numbers(row), arguments, contradicts)


def _score_difference(row: Row) -> float | None:
    """Return the chosen response's score minus the rejected one's; scores that are no numbers are ignored."""
    for chosen, rejected in _SCORES:
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            return float(row[chosen]) - float(row[rejected])
    return None


def score_margin(row: Row, margin: float) -> float:
    """Return the difference of the scores of a row, which has no margin besides."""
    difference = _score_difference(row)
    if difference is None or not abs(difference) <= _LARGEST_NUMBER:
        names = ", ".join(" and ".join(pair) for pair in _SCORES)
        raise BadRowError(f"margin_from_scores needs finite scores in two columns, one of the pairs {names}")
    if margin:
        raise BadRowError("the row has a `margin` and scores; remove one, or turn margin_from_scores off")
    return difference


def _template_arguments(row: Row) -> dict[str, Any]:
    """Read the variables of the chat template; a null is a key that other rows of the file have."""
    name = next((name for name in _ARGUMENTS if row.get(name) is not None), None)
    if name is None:
        return {}
    value = row[name]
    if isinstance(value, str):  # as CSV files have it
        try:
            value = decode_json(value)
        except ValueError as error:
            raise BadRowError(f"`{name}` is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRowError(f"`{name}` must be an object with variables of the chat template, got {quoted(value)}")
    return {key: each for key, each in value.items() if each is not None}


def _side(row: Row, name: str) -> list[Message]:
    return to_messages(row[name], "assistant", name)


def _text(row: Row, name: str, default: str | None = None) -> str:
    value = default if row.get(name) is None else row[name]
    if not isinstance(value, str):
        raise BadRowError(f"`{name}` must be text, got {type(value).__name__}")
    return value


def _with_input(row: Row, text: str) -> str:
    return "\n\n".join(filter(None, (text, _text(row, "input", ""))))


def _number(row: Row, name: str, default: float) -> float:
    value = row.get(name)
    if value is None or value == "":
        return default
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise BadRowError(f"`{name}` must be a number, got {quoted(value)}") from error
    except OverflowError:
        number = math.inf
    # stored as float32, where a larger number would become infinite
    if isinstance(value, bool) or not abs(number) <= _LARGEST_NUMBER:
        raise BadRowError(f"`{name}` must be a finite number, got {quoted(value)}")
    return number
