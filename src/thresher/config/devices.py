"""Parse `device_mapping`: global device ids as a list or as text; no code is evaluated."""

from __future__ import annotations

import ast

_EXAMPLES = "write it like `list(range(0,8))` or `[0, 1, 2, 3]`"
_MOST_DEVICES = 1_000_000


def parse_device_mapping(value: object) -> list[int] | None:
    """Return the global device ids of a role; None for CPU workers."""
    if value is None:
        return None
    if isinstance(value, str):
        ids = _from_text(value)
    elif isinstance(value, list | tuple) and all(type(item) is int for item in value):
        ids = list(value)
    else:
        raise ValueError(f"not a device list; {_EXAMPLES}")
    if len(set(ids)) != len(ids):
        raise ValueError(f"device ids repeat; {_EXAMPLES}")
    if any(i < 0 for i in ids):
        raise ValueError(f"device ids are negative; {_EXAMPLES}")
    return ids


def _from_text(text: str) -> list[int]:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"not a device list; {_EXAMPLES}") from None
    try:
        return _ids(tree)
    except RecursionError:
        raise ValueError(f"too many lists are added; {_EXAMPLES}") from None


def _ids(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_integer(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _ids(left) + _ids(right)
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _ids(inner)
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if 1 <= len(args) <= 3:
            bounds = [_integer(arg) for arg in args]
            if max(map(abs, bounds)) > _MOST_DEVICES or bounds[2:] == [0]:
                raise ValueError(f"range has step 0 or a bound above {_MOST_DEVICES}; {_EXAMPLES}")
            return list(range(*bounds))
    raise ValueError(f"not a device list; {_EXAMPLES}")


def _integer(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
    raise ValueError(f"not a device list; {_EXAMPLES}")
