"""A finished tiny run, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli_runner import command_line
from tests.support.small_runs import make_base
from thresher.config import parse_config
from thresher.pipeline import DPOPipeline

__all__ = ["command_line"]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps; its reference is in the directory next to it."""
    directory = tmp_path_factory.mktemp("evaluated")
    values = make_base(directory)
    DPOPipeline(parse_config({**values, "output_dir": str(directory / "run")})).run()
    return directory / "run"
