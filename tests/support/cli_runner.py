"""Runs `thresher` with arguments in the test process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

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


class Result(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


CommandLine = Callable[..., Result]


@pytest.fixture
def command_line(monkeypatch, capsys, tmp_path) -> CommandLine:
    """Run `thresher` with arguments in an empty directory; no error may show a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Result:
        code = exit_code_of(monkeypatch, arguments)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return Result(code, printed.out, printed.err)

    return run
