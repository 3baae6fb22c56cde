"""What a file says about a row, as a row of columns: parsed, and checked for what no later step should have to fear.

Refused as bad rows: what is not UTF-8, not JSON or no object; keys that stand twice, of which one would be lost; lone
halves of surrogates, which are no text; nesting so deep that code that walks it would run out of stack; lines of CSV
with more fields than the header; lines longer than `MAX_ROW_BYTES`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# a pair of a million tokens is some ten megabytes; a longer line is a file without line ends, or a bomb
MAX_ROW_BYTES = 32 << 20
MAX_DEPTH = 64
_SHOWN_CHARACTERS = 80
Row = dict[str, Any]


class BadRowError(Exception):
    """A row that cannot become a pair; its text is the reason."""


@dataclass(frozen=True)
class Unreadable:
    """In place of a row that could not be held or sent to another process as it is: why, and what can be shown."""

    reason: str
    content: str

    @classmethod
    def of(cls, reason: str, value: Any) -> Unreadable:
        try:
            return cls(reason, ascii(value))
        except (RecursionError, ValueError):
            return cls(reason, "(cannot be written)")


class _RepeatedKey(dict[str, Any]):
    """An object in which a key stands twice."""

    key: str = ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    repeated = _RepeatedKey(values)
    keys = [key for key, _ in pairs]
    repeated.key = next(key for key in values if keys.count(key) > 1)
    return repeated


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def decode_json(text: str) -> Any:
    """Parse JSON; an object with a repeated key is found by `parse_row`. Too deep is a `ValueError`, as not JSON is."""
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from error


def parse_row(content: Any) -> Row:
    """Turn a block's content into a row of columns, or raise `BadRowError`."""
    if isinstance(content, Unreadable):
        raise BadRowError(content.reason)
    if isinstance(content, bytes):
        content = _parse_line(content)
    if not isinstance(content, dict):
        raise BadRowError(f"expected an object with columns, got {type(content).__name__}")
    if None in content:
        raise BadRowError("the line has more fields than the header")
    if (wrong := find_invalid(content)) is not None:
        raise BadRowError(wrong)
    return content


def _parse_line(line: bytes) -> Any:
    try:
        return decode_json(line.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise BadRowError(f"not UTF-8: {error.reason} at byte {error.start}{_hint(line)}") from error
    except ValueError as error:
        raise BadRowError(f"not JSON: {error}{_hint(line)}") from error


def _hint(line: bytes) -> str:
    if line.startswith((b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"PAR1", b"PK\x03\x04")):
        return "; the file looks packed or binary: give it the suffix of its format"
    if b"\x00" in line:
        return "; the file looks like UTF-16 or binary: write it as UTF-8"
    return ""


def find_invalid(value: Any) -> str | None:
    """Say what is wrong within a value, without recursion: text that is none, repeated keys, too many levels."""
    waiting = [(value, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, str):
            if not is_text(value):
                return f"bytes that are not UTF-8, or half of a surrogate, in {quoted(value)}"
        elif isinstance(value, dict | list | tuple):
            if depth > MAX_DEPTH:
                return f"nested more than {MAX_DEPTH} levels deep"
            if isinstance(value, _RepeatedKey):
                return f"the key {quoted(value.key)} stands twice in one object"
            parts = [each for item in value.items() for each in item] if isinstance(value, dict) else value
            waiting += [(each, depth + 1) for each in parts]
    return None


def is_text(value: str) -> bool:
    """Tell whether a string is text; halves of surrogates, which also stand for undecodable bytes, are none."""
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def quoted(value: Any) -> str:
    """Quote a value in a message, shortened: a value may be megabytes long."""
    if not isinstance(value, str | int | float | bool | None):
        return f"a {type(value).__name__}"
    try:
        text = repr(value)
    except ValueError:  # Python writes no integers of many thousand digits
        return "a huge integer"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
