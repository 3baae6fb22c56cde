"""Copies between host and GPU that the host does not wait for; without a GPU, they can only be read."""

from __future__ import annotations

import ast
from pathlib import Path

import thresher

PACKAGE = Path(thresher.__file__).parent
# copies from and to memory that they pin themselves: from other memory, the host waits in spite of non_blocking
ALLOWED = {
    "distributed/tensors.py: copy_to_device",
    "checkpoint/background.py: copy",
    "distributed/replicas.py: finish",
}


def test_only_copies_of_pinned_memory_are_asynchronous() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {function.name}"
        for path in PACKAGE.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and any(each.arg == "non_blocking" for each in call.keywords)
    }
    assert found == ALLOWED
