"""Normalize conversations to lists of messages with `role` and `content`.

Decides how ShareGPT, OpenAI and transcript conventions map to roles, and where a conversation splits into prompt
and response.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from thresher.data.rows.parsing import BadRowError, decode_json, find_invalid, quoted

Message = dict[str, Any]

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
    "developer": "developer",
}
SYSTEM_ROLES = ("system", "developer")
_STANDARD_KEYS = frozenset({"role", "from", "content", "value"})
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def to_messages(value: Any, role: str, column: str) -> list[Message]:
    """Read a column as messages; plain text becomes one message of the given role."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        if isinstance(value.get("messages"), list):
            return to_messages(value["messages"], role, column)
        return [_to_message(value, column)]
    if isinstance(value, list):
        return [_to_message(item, column) for item in value]
    raise BadRowError(f"`{column}` must be text or messages, got {_type_name(value)}")


def _to_message(item: Any, column: str) -> Message:
    if not isinstance(item, dict):
        raise BadRowError(f"`{column}` must be a list of messages, got {_type_name(item)}")
    role = item.get("role", item.get("from"))
    if not isinstance(role, str):
        raise BadRowError(f"a message of `{column}` has no role; its keys are {_keys(item)}")
    if role.lower() not in _ROLES:
        raise BadRowError(f"a message of `{column}` has the unknown role {quoted(role)}")
    content = item["content"] if "content" in item else item.get("value")
    # Arrow structs have every key in every row; a null value means that the row did not set it
    extra = {key: value for key, value in item.items() if key not in _STANDARD_KEYS and value is not None}
    if content is None and not extra:
        raise BadRowError(f"a message of `{column}` has no content; its keys are {_keys(item)}")
    return {"role": _ROLES[role.lower()], "content": _to_text(content, column), **extra}


def _to_text(content: Any, column: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text)
    raise BadRowError(f"a message of `{column}` has content that is not text: {_type_name(content)}")


def to_tools(value: Any) -> list[dict[str, Any]] | None:
    """Read the `tools` column: a list of JSON schemas, or the same as JSON text."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = decode_json(value)
        except ValueError as error:
            raise BadRowError(f"`tools` is text but not JSON: {error}") from error
        if (reason := find_invalid(value)) is not None:
            raise BadRowError(f"`tools` cannot be read: {reason}")
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRowError(f"`tools` must be a list of objects, got {_type_name(value)}")
    return value or None


def is_empty(message: Message) -> bool:
    """Return whether a message has neither text nor another field, such as tool calls."""
    return not message["content"].strip() and message.keys() <= {"role", "content"}


def split_shared_prefix(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of messages in the prompt shared by two conversations; each keeps a response after it."""
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in side):
            raise BadRowError(f"`{name}` has no assistant turn")
    shorter = min(len(chosen), len(rejected))
    shared = next((at for at in range(shorter) if chosen[at] != rejected[at]), shorter)
    # both responses start with an assistant turn, even where one conversation is a prefix of the other
    while shared > 0 and (shared == shorter or chosen[shared]["role"] != "assistant"):
        shared -= 1
    if shared == 0 and "assistant" in (chosen[0]["role"], rejected[0]["role"]):
        raise BadRowError("`chosen` and `rejected` share no prompt; put the prompt in a separate column")
    if shared == 0:
        raise BadRowError("`chosen` and `rejected` share no prompt: they differ before the first assistant turn")
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if side[shared]["role"] != "assistant":
            role = side[shared]["role"]
            raise BadRowError(f"`{name}` has a {role} turn after the shared prompt; expected an assistant turn")
    return shared


@dataclass(frozen=True)
class TextSegment:
    """A piece of a plain-text response; scored if the assistant wrote it."""

    text: str
    scored: bool = True


@dataclass(frozen=True)
class Transcript:
    """A text of `Human:` and `Assistant:` turns."""

    text: str
    messages: list[Message]
    offsets: list[tuple[int, int, int]]  # of each turn: its label, its text, its end

    def segments_from(self, turn: int) -> tuple[TextSegment, ...]:
        """Split the text after the label of `turn` into scored and unscored segments."""
        segments: list[TextSegment] = []
        for message, (label, start, end) in zip(self.messages[turn:], self.offsets[turn:], strict=True):
            segments.append(TextSegment(self.text[label:start], scored=False))
            segments.append(TextSegment(self.text[start:end], message["role"] == "assistant"))
        return tuple(segments[1:])  # the label of the first turn belongs to the prompt


def is_transcript(value: Any) -> bool:
    """Return whether a value is an HH-RLHF transcript, which begins with a human turn."""
    return isinstance(value, str) and value.lstrip().startswith("Human:") and "\n\nAssistant:" in value


def parse_transcript(text: str, column: str) -> Transcript:
    """Read an HH-RLHF transcript; consecutive turns of one speaker become one message."""
    if not is_transcript(text):
        raise BadRowError(f"`{column}` is not a transcript of 'Human:' and 'Assistant:' turns like the first row")
    labels = list(_TURN.finditer(text))
    ends = [*(label.start() for label in labels[1:]), len(text)]
    transcript = Transcript(text, [], [])
    for speaker, group in groupby(zip(labels, ends, strict=True), key=lambda turn: turn[0][1]):
        turns = list(group)
        content = "\n\n".join(text[label.end() : end].strip() for label, end in turns)
        transcript.messages.append({"role": _ROLES[speaker.lower()], "content": content})
        transcript.offsets.append((turns[0][0].start(), turns[0][0].end(), turns[-1][1]))
    return transcript


def _keys(item: Message) -> str:
    return ", ".join(str(key)[:40] for key in list(item)[:40])


def _type_name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
