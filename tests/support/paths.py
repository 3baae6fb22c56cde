"""The checkout, and the real data and models beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
_marks: set[str] = set()  # of the running test


def note_test(item: pytest.Item) -> None:
    """Note the marks of the test that starts."""
    _marks.clear()
    _marks.update(mark.name for mark in item.iter_markers())


def shared_path(*parts: str) -> Path:
    """A file of the real data beside the checkout; the test is skipped where it is missing.

    Without the mark `real` the test fails, even where the file exists: a skipped test must be one that says so.
    """
    name = f"../shared/{'/'.join(parts)}"
    if "real" not in _marks:
        pytest.fail(f"reads {name}, which a plain clone lacks; mark the test `real`, or let it make its input")
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {name}, which is not beside this checkout")
    return path
