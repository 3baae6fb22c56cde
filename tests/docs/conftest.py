"""The built site, for the tests that read it and for the browser."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("site") / "docs"
    # scripts/docs turns every warning, such as a page in no toctree or a link to nothing, into an error
    built = subprocess.run(
        [ROOT / "scripts" / "docs"], env={**os.environ, "DOCS_OUTPUT": str(output)}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return output
