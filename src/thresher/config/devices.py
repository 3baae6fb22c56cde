"""Parse `device_mapping`: global device ids as a list, or spelled as a string; no code is evaluated."""

from __future__ import annotations

import ast

_EXAMPLES = "write it like `list(range(0,8))` or `[0, 1, 2, 3]`"


def parse_device_mapping(value: str | list[int] | None) -> list[int] | None:
    """Return the global device ids of a role, None for CPU workers."""
    if value is None:
        return None
    ids = _from_text(value) if isinstance(value, str) else list(value)
    if len(set(ids)) != len(ids):
        raise ValueError(f"device ids repeat: {ids}; {_EXAMPLES}")
    if any(i < 0 for i in ids):
        raise ValueError(f"device ids are negative: {ids}; {_EXAMPLES}")
    return ids


def _from_text(text: str) -> list[int]:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"not a device list: {text!r}; {_EXAMPLES}") from None
    return _ids(tree, text)


def _ids(node: ast.expr, text: str) -> list[int]:
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_integer(item, text) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _ids(left, text) + _ids(right, text)
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _ids(inner, text)
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if 1 <= len(args) <= 3:
            bounds = range(*(_integer(arg, text) for arg in args))
            if len(bounds) > 1_000_000:
                raise ValueError(f"{text!r} names {len(bounds)} devices; {_EXAMPLES}")
            return list(bounds)
    raise ValueError(f"not a device list: {text!r}; {_EXAMPLES}")


def _integer(node: ast.expr, text: str) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
    raise ValueError(f"not a device list: {text!r}; {_EXAMPLES}")
