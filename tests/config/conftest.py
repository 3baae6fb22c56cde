"""Configs as users read them: with the importers that the command line and `import thresher` install."""

import pytest

from thresher import importers


@pytest.fixture(autouse=True)
def other_trainers_names() -> None:
    importers.install()
