"""The command line, run in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.support.cli_runner import exit_code_of


class Ended(NamedTuple):
    """How a command ended, and all that it printed."""

    code: int
    out: str
    err: str


CommandLine = Callable[..., Ended]


@pytest.fixture
def command_line(monkeypatch, capsys, tmp_path) -> CommandLine:
    """Run `thresher` with arguments, in an empty directory; no mistake may show a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Ended:
        code = exit_code_of(monkeypatch, arguments)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return Ended(code, printed.out, printed.err)

    return run
