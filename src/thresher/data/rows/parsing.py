"""Parse the content of a row into columns and validate it, so later steps need no such checks.

Bad rows: not UTF-8, not JSON or not an object; repeated keys, of which one would be lost; lone surrogates; nesting so
deep that recursive code would overflow the stack; CSV lines with more fields than the header; lines longer than
`MAX_ROW_BYTES`. Which columns a row needs is decided by `formats`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.data.example import Example, Response, TokenIds, TokenWeights

# a pair of a million tokens is about 10 MB; a longer line is a file without line ends or a decompression bomb
MAX_ROW_BYTES = 32 << 20
MAX_DEPTH = 64
_MAX_QUOTED_CHARACTERS = 80
Row = dict[str, Any]


class BadRowError(Exception):
    """A row cannot become a pair; the message is the reason."""


@dataclass(frozen=True)
class Unreadable:
    """Replaces a row that cannot be kept in memory or pickled: the reason, and a printable excerpt."""

    reason: str
    content: str

    @classmethod
    def of(cls, reason: str, value: Any) -> Unreadable:
        try:
            return cls(reason, ascii(value))
        except (RecursionError, ValueError):
            return cls(reason, "(cannot be printed)")


class _RepeatedKey(dict[str, Any]):
    """A JSON object with a repeated key."""

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
    """Parse JSON, or raise `ValueError`; repeated keys are left for `find_invalid`."""
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from error


def parse_row(content: Any) -> Row:
    """Parse one content of a block into columns, or raise `BadRowError`."""
    if isinstance(content, Unreadable):
        raise BadRowError(content.reason)
    if isinstance(content, bytes):
        try:
            content = decode_json(content.decode("utf-8").removeprefix("\ufeff"))
        except UnicodeDecodeError as error:
            raise BadRowError(f"not UTF-8: {error.reason} at byte {error.start}{_hint(content)}") from error
        except ValueError as error:
            raise BadRowError(f"not JSON: {error}{_hint(content)}") from error
    if not isinstance(content, dict):
        raise BadRowError(f"expected an object with columns, got {type(content).__name__}")
    if None in content:
        raise BadRowError("the line has more fields than the header")
    if (reason := find_invalid(content)) is not None:
        raise BadRowError(reason)
    return content


def _hint(line: bytes) -> str:
    if line.startswith((b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"PAR1", b"PK\x03\x04")):
        return "; the file looks compressed or binary: give it the suffix of its format"
    if b"\x00" in line:
        return "; the file looks like UTF-16 or binary: write it as UTF-8"
    return ""


def find_invalid(value: Any) -> str | None:
    """Return why a value is invalid at any depth, or None: invalid Unicode, repeated keys, too many levels."""
    # a stack instead of recursion, which deep values would overflow
    stack = [(value, 1)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, str):
            if not is_text(value):
                return f"invalid UTF-8 or a lone surrogate in {quoted(value)}"
        elif isinstance(value, dict | list | tuple):
            if depth > MAX_DEPTH:
                return f"nested more than {MAX_DEPTH} levels deep"
            if isinstance(value, _RepeatedKey):
                return f"the key {quoted(value.key)} is repeated in one object"
            children = [child for item in value.items() for child in item] if isinstance(value, dict) else value
            stack += [(child, depth + 1) for child in children]
    return None


def is_text(value: str) -> bool:
    """Return whether a string is valid Unicode: no lone surrogates, which `surrogateescape` uses for invalid bytes."""
    if value.isascii():
        return True
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def quoted(value: Any) -> str:
    """Quote a value in a message, shortened because it may be megabytes long."""
    if not isinstance(value, str | int | float | bool | None):
        return f"a {type(value).__name__}"
    try:
        text = repr(value)
    except ValueError:  # Python limits the digits of an integer that it converts to text
        return "a huge integer"
    return text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{text[:_MAX_QUOTED_CHARACTERS]}..."


def read_tokenized(
    row: Row, vocab_size: int, weight: float, margin: float, *, has_token_weights: bool = False
) -> Example:
    """Read a row of token ids with loss masks, as ColossalChat's `prepare_dataset.py` writes them: no template.

    The prompt is what precedes the first scored token, and must be the same on both sides. Tokens after the last scored
    token, such as padding, change no logp and are removed. Nothing predicts the first token, so its mask is ignored.
    """
    (prompt, chosen), (other, rejected) = (
        _read_side(row, side, vocab_size, has_token_weights) for side in ("chosen", "rejected")
    )
    if not np.array_equal(prompt, other):
        raise BadRowError(
            f"the tokens before the first scored token differ between the sides ({len(prompt)} and {len(other)} tokens)"
        )
    return Example(prompt, (chosen, rejected), weight, margin)


def _read_side(row: Row, side: str, vocab_size: int, has_token_weights: bool) -> tuple[TokenIds, Response]:
    """Split a sequence into prompt and response."""
    ids = _integers(row, f"{side}_input_ids")
    mask = _integers(row, f"{side}_loss_mask").astype(np.bool_)
    if len(ids) != len(mask):
        raise BadRowError(f"`{side}_input_ids` has {len(ids)} tokens, but `{side}_loss_mask` has {len(mask)} values")
    weights = _read_weights(row, side, len(ids), has_token_weights)
    if row.get(f"{side}_attention_mask") is not None:
        attended = _integers(row, f"{side}_attention_mask").astype(np.bool_)
        if len(attended) != len(ids):
            raise BadRowError(f"`{side}_attention_mask` has {len(attended)} values for {len(ids)} tokens")
        ids, mask, weights = ids[attended], mask[attended], None if weights is None else weights[attended]
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        outside = next(int(each) for each in ids if not 0 <= each < vocab_size)
        raise BadRowError(
            f"`{side}_input_ids` contains the token id {outside}, but the tokenizer has {vocab_size} tokens; use the "
            "tokenizer that the rows were made with"
        )
    scored = np.flatnonzero(mask[1:]) + 1
    if not len(scored):
        raise BadRowError(f"`{side}_loss_mask` scores no token after the first")
    first, end = int(scored[0]), int(scored[-1]) + 1
    response = Response(ids[first:end].astype(np.int32), None if mask[first:end].all() else mask[first:end])
    if weights is not None:
        response = response._replace(weights=weights[first:end])
    return ids[:first].astype(np.int32), response


def _read_weights(row: Row, side: str, length: int, has_token_weights: bool) -> TokenWeights | None:
    name = f"{side}_token_weights"
    if not has_token_weights:
        if row.get(name) is not None:
            raise BadRowError(
                f"the row has `{name}`, but the first row of the file does not have it for both sides; give each row "
                "`chosen_token_weights` and `rejected_token_weights`"
            )
        return None
    numbers = _numbers(row, name)
    if len(numbers) != length:
        raise BadRowError(f"`{side}_input_ids` has {length} tokens, but `{name}` has {len(numbers)} values")
    if not (np.isfinite(numbers) & (numbers >= 0) & (numbers <= np.finfo(np.float32).max)).all():
        raise BadRowError(f"`{name}` must have finite numbers that are not negative")
    return numbers.astype(np.float32)


def _numbers(row: Row, name: str) -> npt.NDArray[np.float64]:
    value: Any = row[name]
    if not isinstance(value, list) or not all(isinstance(each, int | float) for each in value):
        raise BadRowError(f"`{name}` must be a list of numbers")
    try:
        return np.asarray(value, dtype=np.float64)
    except OverflowError as error:
        raise BadRowError(f"`{name}` has an integer that is too large") from error


def _integers(row: Row, name: str) -> npt.NDArray[np.int64]:
    numbers = _numbers(row, name)
    if not np.array_equal(numbers, np.trunc(numbers)) or np.abs(numbers).max(initial=0) > 2**31 - 1:
        raise BadRowError(f"`{name}` must have integers only")
    return numbers.astype(np.int64)
