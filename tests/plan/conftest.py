"""Small models, shared by the tests of a folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.engines.parity import save_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Callable[[str], Path]:
    return cache(lambda family: save_model(tmp_path_factory.mktemp(family) / "policy", family, seed=0))
