"""JSON for checkpoint state that is not a tensor, with an exact round trip.

Floats round-trip bit for bit (Python prints the shortest digits that do). NaN and the infinities, which JSON lacks, are
stored as `{"$float": "nan"}`. Values that JSON would silently change are rejected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from thresher import durable
from thresher.errors import CheckpointError, UserError

Json: TypeAlias = "bool | int | float | str | list[Json] | tuple[Json, ...] | Mapping[str, Json] | None"

_FLOAT = "$float"


def encode(value: Json, *, sort_keys: bool = False) -> bytes:
    """Return a value as the bytes of a JSON file. Tuples become lists; everything else is equal after `decode`."""
    text = json.dumps(_to_json(value), allow_nan=False, ensure_ascii=False, indent=1, sort_keys=sort_keys)
    # a lone surrogate is valid in a Python string but not in UTF-8, and must survive as well
    return text.encode("utf-8", errors="surrogatepass")


def decode(content: bytes) -> Any:
    """Parse the output of `encode`."""
    text = content.decode("utf-8", errors="surrogatepass")
    return json.loads(text, object_hook=_from_json, parse_constant=_reject_constant)


def save_json(path: Path, value: Json) -> None:
    """Write a value as JSON and flush it to the disk."""
    durable.write(path, encode(value))


def load_json(path: Path) -> Any:
    """Read a file that `save_json` wrote."""
    # besides invalid JSON: a `$float` that is not a number, or nesting beyond the recursion limit
    with translate_read_errors(path, "valid JSON", ValueError, TypeError, OverflowError, RecursionError):
        return decode(path.read_bytes())


@contextmanager
def translate_read_errors(path: Path, expected: str, *parse_errors: type[Exception]) -> Iterator[None]:
    """Raise a `CheckpointError` that names the file, for an OSError or one of `parse_errors`.

    Too many open files are not the checkpoint's fault: no other one is to be tried.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; resume from a different checkpoint") from error
    except OSError as error:
        if hint := durable.open_files_hint(error):
            raise UserError(f"{path} cannot be opened ({error.strerror}); {hint}") from error
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error}); resume from a different one"
        ) from error
    except parse_errors as error:
        raise CheckpointError(f"{path} is not {expected} ({error}); resume from a different checkpoint") from error


def _to_json(value: object) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str or key == _FLOAT:
                raise TypeError(f"a key of saved state must be a string other than {_FLOAT!r}, got {key!r}")
        return {key: _to_json(item) for key, item in value.items()}
    # subclasses (numpy scalars, enums) would be read back as a different type
    raise TypeError(f"saved state must be plain JSON values, got {value!r} of type {type(value).__name__}")


def _from_json(value: dict[str, Any]) -> Any:
    return float(value[_FLOAT]) if value.keys() == {_FLOAT} else value


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
