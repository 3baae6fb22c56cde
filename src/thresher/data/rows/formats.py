"""Rows of any known shape become `PreferenceRow`s. A file's first row decides its shape; no other row changes it.

Rendering and tokenising are left to `template` and `tokenize`; rows that need a partner are joined by `unpaired`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from thresher.data.rows.messages import (
    Message,
    TextSegment,
    is_transcript,
    parse_transcript,
    split_shared_prefix,
    to_messages,
    to_tools,
)
from thresher.data.rows.parsing import BadRowError, Row, quoted
from thresher.errors import UserError

# each answer of a response is rendered with all that came before it
MAX_MESSAGES = 1000
_LARGEST_NUMBER = float(np.finfo(np.float32).max)
_MAX_NAMES = 40


@dataclass(frozen=True)
class PlainText:
    """A row's own text for `template=raw`, where it says more than its messages: prompt + segments, nothing between."""

    prompt: str
    chosen: tuple[TextSegment, ...]
    rejected: tuple[TextSegment, ...]


@dataclass(frozen=True)
class PreferenceRow:
    """One pair before tokenising. `chosen` and `rejected` hold the messages after the prompt, an assistant's first."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[dict[str, Any]] | None = None
    plain: PlainText | None = None
    weight: float = 1.0
    margin: float = 0.0


@dataclass(frozen=True)
class RowFormat:
    """A way to write a pair: the columns it needs, those it may have, and how to read them."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Row], PreferenceRow]
    is_unpaired: bool = False


def _read_instruction(row: Row) -> PreferenceRow:
    prompt = _history(row.get("history"))
    prompt.append({"role": "user", "content": _join(_text(row, "instruction"), row.get("input"))})
    return _pair(row, prompt, _side(row, "chosen"), _side(row, "rejected"))


def _history(value: Any) -> list[Message]:
    if value is None or value == "":
        return []
    if not isinstance(value, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in value):
        raise BadRowError("`history` must be a list of [question, answer]")
    if not all(isinstance(text, str) for turn in value for text in turn):
        raise BadRowError("`history` must hold texts")
    turns = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in value]
    return [message for turn in turns for message in turn]


def _read_prompt(row: Row) -> PreferenceRow:
    column = next(name for name in ("prompt", "messages", "conversations") if row.get(name) is not None)
    value, chosen, rejected = row[column], row.get("chosen"), row.get("rejected")
    if isinstance(value, str):
        value = _join(value, row.get("input"))
        if isinstance(chosen, str) and isinstance(rejected, str):
            return _read_texts(row, value, chosen, rejected)
    prompt = to_messages(value, "user", column)
    sides = _side(row, "chosen"), _side(row, "rejected")
    if sides[0] and sides[0][0]["role"] != "assistant":
        # whole conversations beside a prompt: the prompt is said again in them, or comes before them
        shared = split_shared_prefix(*sides)
        said = sides[0][:shared]
        spoken = {message["content"] for message in said}
        before = [] if all(message["content"] in spoken for message in prompt) else prompt
        return _pair(row, before + said, sides[0][shared:], sides[1][shared:])
    return _pair(row, prompt, *sides)


def _read_texts(row: Row, prompt: str, chosen: str, rejected: str) -> PreferenceRow:
    if is_transcript(prompt) and prompt.rstrip().endswith("\n\nAssistant:"):
        messages = parse_transcript(prompt, "prompt").messages[:-1]
    else:
        messages = [{"role": "user", "content": prompt}]
    system = row.get("system")
    before = f"{system}\n\n" if isinstance(system, str) and system else ""
    plain = PlainText(before + prompt, (TextSegment(chosen),), (TextSegment(rejected),))
    return _pair(row, messages, _side(row, "chosen"), _side(row, "rejected"), plain)


def _read_transcripts(row: Row) -> PreferenceRow:
    chosen = parse_transcript(_text(row, "chosen"), "chosen")
    rejected = parse_transcript(_text(row, "rejected"), "rejected")
    turn = split_shared_prefix(chosen.messages, rejected.messages)
    plain = PlainText(chosen.text[: chosen.starts[turn]], chosen.segments_from(turn), rejected.segments_from(turn))
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
    return _read_texts({**row, "chosen": chosen, "rejected": rejected}, question, chosen, rejected)


def _read_unpaired(row: Row) -> PreferenceRow:
    raise AssertionError(f"{sorted(row)}: rows with a label are joined by `unpaired` before they are read")


_OPTIONAL = ("system", "tools", "margin", "weight")
# in order of preference: the first shape whose columns are all there is taken
FORMATS: tuple[RowFormat, ...] = (
    RowFormat("openai", ("input", "preferred_output", "non_preferred_output"), _OPTIONAL, _read_openai),
    RowFormat(
        "evals", ("question", "answer_matching_behavior", "answer_not_matching_behavior"), _OPTIONAL, _read_evals
    ),
    RowFormat(
        "instruction", ("instruction", "chosen", "rejected"), ("input", "history", *_OPTIONAL), _read_instruction
    ),
    RowFormat("prompt", ("prompt", "chosen", "rejected"), ("input", *_OPTIONAL), _read_prompt),
    RowFormat("messages", ("messages", "chosen", "rejected"), _OPTIONAL, _read_prompt),
    RowFormat("conversations", ("conversations", "chosen", "rejected"), _OPTIONAL, _read_prompt),
    RowFormat("transcripts", ("chosen", "rejected"), _OPTIONAL, _read_transcripts),
    RowFormat("whole_conversations", ("chosen", "rejected"), _OPTIONAL, _read_conversations),
    RowFormat("labelled_completions", ("prompt", "completion", "label"), _OPTIONAL, _read_unpaired, is_unpaired=True),
    RowFormat("labelled_messages", ("messages", "label"), _OPTIONAL, _read_unpaired, is_unpaired=True),
    RowFormat("labelled_conversations", ("conversations", "label"), _OPTIONAL, _read_unpaired, is_unpaired=True),
)
SHAPE_OF_NAME = {shape.name: shape for shape in FORMATS}


def detect_format(row: Row, column_names: Mapping[str, str], where: str) -> RowFormat:
    """Name the shape of a file from its first row."""
    for ours, theirs in column_names.items():
        if theirs not in row:
            nearest = difflib.get_close_matches(theirs, list(row)[:_MAX_NAMES], n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise UserError(
                f"{where}: no column {theirs!r}, which {ours}_key names; the columns are {_names(row)}{hint}"
            )
    row = rename(row, column_names)
    present = {name for name, value in row.items() if value is not None}
    for shape in FORMATS:
        # a column that the user named must be one that the shape reads
        if (
            present.issuperset(shape.required)
            and set(column_names).issubset(shape.required)
            and _fits_values(shape, row)
        ):
            return shape
    raise UserError(_unknown_shape(row, where))


def _fits_values(shape: RowFormat, row: Row) -> bool:
    if shape.name == "transcripts":
        return is_transcript(row["chosen"])
    if shape.name == "whole_conversations":
        return isinstance(row["chosen"], list | dict)
    return True


def _unknown_shape(row: Row, where: str) -> str:
    if {"chosen", "rejected"} <= set(row):
        keys, missing = ["prompt"], "the prompt"
    else:
        keys = [name for name in ("chosen", "rejected", "prompt") if name not in row]
        missing = " and ".join(keys)
    mends = []
    for key in keys:
        nearest = difflib.get_close_matches(key, [str(name) for name in row][:_MAX_NAMES], n=1, cutoff=0.5)
        mends.append(f"{key}_key={nearest[0] if nearest else 'COLUMN'}")
    known = "\n".join(f"  {shape.name}: {', '.join(shape.required)}" for shape in FORMATS)
    return (
        f"{where}: the columns {_names(row)} are no shape we know ({missing} not found). "
        f"Name your columns with {' '.join(mends)}, or write rows in one of these shapes:\n{known}"
    )


def _names(row: Row) -> str:
    more = f" and {len(row) - _MAX_NAMES} more" if len(row) > _MAX_NAMES else ""
    return (", ".join(str(name)[:_MAX_NAMES] for name in list(row)[:_MAX_NAMES]) or "(none)") + more


def rename(row: Row, column_names: Mapping[str, str]) -> Row:
    """Give the columns that the user named our names."""
    if not column_names:
        return row
    # a column that already has our name gives way to the one that the user named
    kept = {name: value for name, value in row.items() if name not in column_names}
    return {**kept, **{ours: row[theirs] for ours, theirs in column_names.items() if theirs in row}}


def to_preference_row(row: Row, shape: RowFormat, column_names: Mapping[str, str]) -> PreferenceRow:
    """Read a row by its file's shape, or raise `BadRowError`."""
    row = rename(row, column_names)
    missing = [column_names.get(name, name) for name in shape.required if row.get(name) is None]
    if missing:
        raise BadRowError(f"no value for {', '.join(missing)}; its columns are {_names(row)}")
    read = shape.read(row)
    for name, side in (("chosen", read.chosen), ("rejected", read.rejected)):
        if not side:
            raise BadRowError(f"`{name}` holds no message")
        if len(side) > MAX_MESSAGES:
            raise BadRowError(f"`{name}` holds {len(side)} messages; at most {MAX_MESSAGES} are read")
        if side[0]["role"] != "assistant" or side[-1]["role"] != "assistant":
            raise BadRowError(f"`{name}` must begin and end with an assistant's turn, got {_roles(side)}")
    if not read.prompt:
        raise BadRowError("the prompt holds no message")
    return read


def _roles(messages: list[Message]) -> str:
    return ", ".join(message["role"] for message in messages)


def _pair(
    row: Row, prompt: list[Message], chosen: list[Message], rejected: list[Message], plain: PlainText | None = None
) -> PreferenceRow:
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        raise BadRowError(f"`system` must be text, got {type(system).__name__}")
    if system and prompt and prompt[0]["role"] == "system":
        if prompt[0]["content"] != system:
            raise BadRowError("`system` says other things than the system message of the prompt; keep one")
    elif system:
        prompt = [{"role": "system", "content": system}, *prompt]
    weight, margin = _number(row, "weight", 1.0), _number(row, "margin", 0.0)
    if weight < 0:
        raise BadRowError(f"`weight` must not be negative, got {weight}")
    return PreferenceRow(prompt, chosen, rejected, to_tools(row.get("tools")), plain, weight, margin)


def _side(row: Row, name: str) -> list[Message]:
    return to_messages(row[name], "assistant", name)


def _text(row: Row, name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise BadRowError(f"`{name}` must be text, got {type(value).__name__}")
    return value


def _join(text: str, more: Any) -> str:
    if more is None or more == "":
        return text
    if not isinstance(more, str):
        raise BadRowError(f"`input` must be text, got {type(more).__name__}")
    return f"{text}\n\n{more}" if text else more


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
    # a store holds 32 bits: what is more would become infinite there
    if isinstance(value, bool) or not abs(number) <= _LARGEST_NUMBER:
        raise BadRowError(f"`{name}` must be a finite number, got {quoted(value)}")
    return number
