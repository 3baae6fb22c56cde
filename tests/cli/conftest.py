"""Runs the command line in the test process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.support.cli_runner import exit_code_of


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
