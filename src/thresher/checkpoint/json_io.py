"""JSON that gives back exactly what went in.

Decides how state that is not a tensor is spelled: floats round-trip bit for bit (Python prints the shortest
digits that do), NaN and the infinities are spelled `{"$float": "nan"}` because JSON has no word for them, and
whatever JSON would silently change is refused.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from thresher import durable
from thresher.errors import CheckpointError

Json: TypeAlias = "bool | int | float | str | list[Json] | tuple[Json, ...] | Mapping[str, Json] | None"

_FLOAT = "$float"


def dumps(value: Json, *, sort_keys: bool = False) -> str:
    """Spell a value as JSON. Tuples become lists; everything else comes back equal."""
    return json.dumps(_spell(value), allow_nan=False, ensure_ascii=False, indent=1, sort_keys=sort_keys)


def encode(value: Json, *, sort_keys: bool = False) -> bytes:
    """Spell a value as the bytes of a file."""
    # A lone surrogate is a legal Python string but no legal UTF-8; it must survive as well.
    return dumps(value, sort_keys=sort_keys).encode("utf-8", errors="surrogatepass")


def loads(text: str) -> Any:
    """Read what `dumps` wrote."""
    return json.loads(text, object_hook=_unspell, parse_constant=_refuse_constant)


def save_json(path: Path, value: Json) -> None:
    """Write a value as JSON and flush it to the disk."""
    durable.write(path, encode(value))


def load_json(path: Path) -> Any:
    """Read a value that `save_json` wrote."""
    # beside what is no JSON: a number spelled by something else, or nesting without an end
    with reading(path, "the JSON it should be", ValueError, TypeError, OverflowError, RecursionError):
        return loads(path.read_bytes().decode("utf-8", errors="surrogatepass"))


@contextmanager
def reading(path: Path, what: str, *faults: type[Exception]) -> Iterator[None]:
    """Say which file of a checkpoint cannot be read: it is absent, the disk refuses, or one of `faults` is found."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; resume from another checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); resume from another one") from error
    except faults as error:
        raise CheckpointError(f"{path} is not {what} ({error}); resume from another checkpoint") from error


def _spell(value: object) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, list | tuple):
        return [_spell(item) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str or key == _FLOAT:
                raise TypeError(f"a key of saved state must be a string other than {_FLOAT!r}, got {key!r}")
        return {key: _spell(item) for key, item in value.items()}
    # Subclasses (numpy scalars, enums) would come back as another type.
    raise TypeError(f"saved state must be plain JSON values, got {value!r} of type {type(value).__name__}")


def _unspell(value: dict[str, Any]) -> Any:
    return float(value[_FLOAT]) if value.keys() == {_FLOAT} else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
