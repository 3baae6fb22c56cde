"""Conversations in one form: lists of messages with `role` and `content`, whatever spelling they came in.

Decides how ShareGPT, OpenAI and transcript spellings map to roles, and where a conversation splits into prompt
and response.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thresher.data.rows.parsing import BadRowError, decode_json, find_invalid, quoted

Message = dict[str, Any]

_ROLE_OF: dict[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
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
    raise BadRowError(f"`{column}` must be text or messages, got {_kind(value)}")


def _to_message(item: Any, column: str) -> Message:
    if not isinstance(item, dict):
        raise BadRowError(f"`{column}` must hold messages, got {_kind(item)}")
    theirs = item.get("role", item.get("from"))
    if not isinstance(theirs, str):
        raise BadRowError(f"a message of `{column}` has no role; its keys are {_keys(item)}")
    if theirs.lower() not in _ROLE_OF:
        raise BadRowError(f"a message of `{column}` has the unknown role {quoted(theirs)}")
    content = item["content"] if "content" in item else item.get("value")
    # columns of Arrow files hold every key of every row; those without a value were never written
    extra = {key: value for key, value in item.items() if key not in _SPELLINGS and value is not None}
    if content is None and not extra:
        raise BadRowError(f"a message of `{column}` has no content; its keys are {_keys(item)}")
    return {"role": _ROLE_OF[theirs.lower()], "content": _to_text(content, column), **extra}


_SPELLINGS = frozenset({"role", "from", "content", "value"})


def _to_text(content: Any, column: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [
            part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None for part in content
        ]
        if all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text)
    raise BadRowError(f"a message of `{column}` has content that is not text: {_kind(content)}")


def to_tools(value: Any) -> list[dict[str, Any]] | None:
    """Read the `tools` column: a list of JSON schemas, or the same as JSON text."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = decode_json(value)
        except ValueError as error:
            raise BadRowError(f"`tools` is text but not JSON: {error}") from error
        if (wrong := find_invalid(value)) is not None:
            raise BadRowError(f"`tools` cannot be read: {wrong}")
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRowError(f"`tools` must be a list of objects, got {_kind(value)}")
    return value or None


def has_content(messages: Sequence[Message]) -> bool:
    """Tell whether an assistant says anything in these messages."""
    return any(
        message["role"] == "assistant" and (message["content"].strip() or set(message) - {"role", "content"})
        for message in messages
    )


def split_shared_prefix(chosen: list[Message], rejected: list[Message]) -> int:
    """Return how many messages are the prompt that two whole conversations share; both keep a response after it."""
    shared = 0
    for left, right in zip(chosen, rejected, strict=False):
        if left != right:
            break
        shared += 1
    # sides that are equal, or one the beginning of the other, differ at the last assistant turn at the latest
    while shared > 0 and (shared >= min(len(chosen), len(rejected)) or chosen[shared]["role"] != "assistant"):
        shared -= 1
    if shared == 0:
        raise BadRowError("`chosen` and `rejected` share no prompt; give the prompt in a column of its own")
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if side[shared]["role"] != "assistant":
            raise BadRowError(f"`{name}` goes on with a {side[shared]['role']} turn where the other side is answered")
    return shared


@dataclass(frozen=True)
class TextSegment:
    """A piece of a response in plain text; only what the assistant says is scored."""

    text: str
    scored: bool = True


@dataclass(frozen=True)
class Transcript:
    """A text of `Human:` and `Assistant:` turns; `starts[i]` is where the text of turn i begins, after its label."""

    text: str
    messages: list[Message]
    starts: list[int]
    label_starts: list[int]

    def segments_from(self, turn: int) -> tuple[TextSegment, ...]:
        """Cut the text after the label of `turn` into scored and unscored pieces."""
        segments: list[TextSegment] = []
        for index in range(turn, len(self.messages)):
            end = self.label_starts[index + 1] if index + 1 < len(self.messages) else len(self.text)
            if index > turn:
                segments.append(TextSegment(self.text[self.label_starts[index] : self.starts[index]], scored=False))
            segments.append(
                TextSegment(self.text[self.starts[index] : end], self.messages[index]["role"] == "assistant")
            )
        return tuple(segments)


def is_transcript(value: Any) -> bool:
    """Tell whether a text is an HH-RLHF transcript, which begins with a human's turn."""
    return isinstance(value, str) and value.lstrip().startswith("Human:") and "\n\nAssistant:" in value


def parse_transcript(text: str, column: str) -> Transcript:
    """Read an HH-RLHF transcript; neighbouring turns of one speaker are one message."""
    if not is_transcript(text):
        raise BadRowError(
            f"`{column}` is no transcript of 'Human:' and 'Assistant:' turns, as the file's first row was"
        )
    labels = list(_TURN.finditer(text))
    messages: list[Message] = []
    said: list[list[str]] = []
    starts: list[int] = []
    label_starts: list[int] = []
    for index, label in enumerate(labels):
        end = labels[index + 1].start() if index + 1 < len(labels) else len(text)
        role = "user" if label[1] == "Human" else "assistant"
        content = text[label.end() : end].strip()
        if messages and messages[-1]["role"] == role:
            said[-1].append(content)
            continue
        messages.append({"role": role, "content": ""})
        said.append([content])
        starts.append(label.end())
        label_starts.append(label.start())
    for message, parts in zip(messages, said, strict=True):
        message["content"] = "\n\n".join(parts)
    return Transcript(text, messages, starts, label_starts)


def _keys(item: Message) -> str:
    return ", ".join(str(key)[:40] for key in list(item)[:40])


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
