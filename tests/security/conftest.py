"""Fixtures: a small finished run to attack, the command line in this process, and a pickle that creates a file."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.attacks import Canary, CommandLine, CommandResult, Run, unsafe_load, update_manifest, values_of
from tests.support.cli_runner import exit_code_of
from tests.support.small_runs import make_base


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    """A canary that is known to work, and that must not be triggered during the test."""
    canary = Canary(tmp_path / "canary")
    for unpickle in (lambda: pickle.loads(canary.pickled), lambda: unsafe_load(canary.saved)):  # noqa: S301
        unpickle()
        assert canary.is_triggered
        canary.path.unlink()
    yield canary
    assert not canary.is_triggered


@pytest.fixture
def thresher(monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path) -> CommandLine:
    """Run `thresher` with arguments; an error must not print a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> CommandResult:
        code = exit_code_of(monkeypatch, arguments)
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err, printed.err
        return CommandResult(code, printed.out + printed.err)

    return run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    from thresher.config import parse_config
    from thresher.pipeline import DPOPipeline

    directory = tmp_path_factory.mktemp("finished")
    make_base(directory)
    run = Run(directory, values_of(directory))
    DPOPipeline(parse_config(run.values)).run()
    return run


@pytest.fixture
def attacked(finished_run: Run, tmp_path: Path) -> Run:
    """A copy of a finished run to tamper with."""
    directory = tmp_path / "attacked"
    shutil.copytree(finished_run.directory, directory)
    for checkpoint in (directory / "output" / "checkpoints").iterdir():
        config = checkpoint / "config.json"
        config.write_text(config.read_text().replace(str(finished_run.directory), str(directory)))
        update_manifest(checkpoint)
    return Run(directory, values_of(directory))
