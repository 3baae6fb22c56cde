"""`thresher` with arguments, run in the process of the tests."""

from __future__ import annotations

import sys

import pytest


def exit_code_of(monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]) -> int:
    """Run the command line as a person would, and say how it left."""
    from thresher.cli import main

    monkeypatch.setattr(sys, "argv", ["thresher", *map(str, arguments)])
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0
