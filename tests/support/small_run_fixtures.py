"""Fixtures that several folders share: the config of a small run, without output_dir."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.small_runs import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_base(tmp_path_factory.mktemp("small"))
