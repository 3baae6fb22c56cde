"""Divide the test files among the processes of a test run.

Files that share something slow to start go to one process: ranks that have imported an engine. Long files begin first,
so that the processes end at about the same time.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# files whose names begin so
_TOGETHER = ("tests/strategies/test_megatron", "tests/strategies/test_deepspeed")
_LONGEST = (
    "tests/strategies/test_megatron",
    "tests/strategies/test_parity.py",
    "tests/runtime/",
    "tests/repository/test_gpu_acceptance.py",
    "tests/plan/",
    "tests/strategies/",
    "tests/models/test_compile.py",
    "tests/docs/",
)


def group_of(node_id: str) -> str:
    file = node_id.partition("::")[0]
    return next((prefix for prefix in _TOGETHER if file.startswith(prefix)), file)


def sort_long_files_first(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next((rank for rank, prefix in enumerate(_LONGEST) if item.nodeid.startswith(prefix)), len(_LONGEST))

    items.sort(key=rank)


class GroupsOfFiles(LoadScopeScheduling):  # type: ignore[misc]
    """Give each process the next group of files, in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
