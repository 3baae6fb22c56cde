"""Divide the test files among the processes of a test run.

Files that share something slow to start go to one process: a Ray node, or ranks that have imported an engine. Long
files begin first, so that the processes end at about the same time; Megatron-Core before other ranks, because the first
pool of a process decides what all its ranks have imported.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_TOGETHER = {
    "Ray": (
        "tests/api/test_on_ray.py",
        *(
            f"tests/runtime/test_{name}.py"
            for name in (
                "damaged_checkpoints",
                "data_parallel",
                "elastic",
                "prepare_on_ray",
                "ray_runs",
                "recovery",
                "skipped_steps_on_ray",
                "timeouts",
                "torchrun",
                "two_nodes",
                "worker_deaths",
                "worker_devices",
                "worker_logs",
            )
        ),
    ),
    "Megatron-Core": ("tests/engines/test_megatron",),
    "DeepSpeed": ("tests/engines/test_deepspeed",),
}
_LONGEST = (
    "Ray",
    "Megatron-Core",
    "tests/engines/test_parity.py",
    "tests/plan/test_simulation.py",
    "tests/training/test_resume.py",
    "tests/runtime/",
    "tests/plan/",
    "DeepSpeed",
    "tests/engines/",
    "tests/compatibility/",
    "tests/docs/",
    "tests/security/",
    "tests/sweep/",
    "tests/api/",
    "tests/models/test_compile.py",
    "tests/cli/test_logging.py",
    "tests/repository/",
)


def group_of(node_id: str) -> str:
    file = node_id.partition("::")[0]
    return next((name for name, files in _TOGETHER.items() if file.startswith(files)), file)


def sort_long_files_first(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        group = group_of(item.nodeid)
        return next((rank for rank, start in enumerate(_LONGEST) if group.startswith(start)), len(_LONGEST))

    items.sort(key=rank)


class GroupsOfFiles(LoadScopeScheduling):  # type: ignore[misc]
    """Give each process the next group of files, in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
