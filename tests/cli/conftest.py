"""The command line, run in the process of the tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest


class Ended(NamedTuple):
    """How a command ended, and all that it printed."""

    code: int
    out: str
    err: str


CommandLine = Callable[..., Ended]


@pytest.fixture
def command_line(monkeypatch, capsys, tmp_path) -> CommandLine:
    """Run `thresher` with arguments, in an empty directory; no mistake may show a traceback."""
    from thresher.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["thresher", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return Ended(code, printed.out, printed.err)

    return run
