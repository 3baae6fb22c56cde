"""Runs `thresher` with arguments in the test process."""

from __future__ import annotations

import sys

import pytest


def exit_code_of(monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]) -> int:
    """Run the command line; return its exit code."""
    from thresher.cli import main

    monkeypatch.setattr(sys, "argv", ["thresher", *map(str, arguments)])
    try:
        main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0
