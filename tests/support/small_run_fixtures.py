"""Fixtures that several folders share: the config of a small run, without output_dir, and Ray sessions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_runs import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_base(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """A local Ray session with enough logical cores for several clusters; runs reuse it."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def ray_for_megatron() -> Iterator[None]:
    """A Ray session whose workers answer torch.cuda with the CPU where Megatron-Core needs it."""
    import ray

    site = Path(__file__).parent / "megatron_site"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        ray.init(address="local", num_cpus=32, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
