"""A real tiny run to report on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.small_runs import make_base
from thresher.config import parse_config
from thresher.pipeline import DPOPipeline


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with evaluations after steps 2 and 4."""
    directory = tmp_path_factory.mktemp("reported")
    values: dict[str, Any] = make_base(directory)
    DPOPipeline(parse_config({**values, "output_dir": str(directory / "tiny")})).run()
    return directory / "tiny"
