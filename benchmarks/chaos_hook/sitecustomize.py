"""Inject faults at a given call inside a process. Python imports a module of this name at start-up.

CHAOS_ORDERS names a directory. An order in it, a JSON file, gives the call (`fsync`, `rename`, `collective`), the path
and the action. `kill` kills the first process that reaches the call, and removes the order; `stall` keeps that process
before the call for ever, alive and with a heartbeat; `sleep` delays all processes for as long as the order exists. The
path of a collective is the activity of the process and its name, such as `step 4: training: all_reduce`, without the
activity in the first steps. A process that stalls writes the path into the order that it took.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

ORDER = "order.json"
TAKEN = "taken-by-{}"

_fsync, _rename, _replace = os.fsync, os.rename, os.replace


def _obey(directory: Path, event: str, path: str, when: str) -> None:
    try:
        order = json.loads((directory / ORDER).read_text())
    except (OSError, ValueError):
        return
    if order["event"] != event or order["path"] not in path or order["when"] != when:
        return
    if order["act"] == "sleep":
        time.sleep(order["seconds"])
        return
    try:
        _rename(directory / ORDER, directory / TAKEN.format(os.getpid()))
    except FileNotFoundError:  # another process was first
        return
    if order["act"] == "stall":
        (directory / TAKEN.format(os.getpid())).write_text(path)
        while True:
            time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


class _Collectives(importlib.abc.MetaPathFinder):
    """Wraps the collectives of torch when it is imported: the names that other modules import are the wrapped ones."""

    names: ClassVar = {
        "torch.distributed.distributed_c10d": (
            "all_reduce",
            "all_gather",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "batch_isend_irecv",
        ),
        # of DTensor
        "torch.distributed._functional_collectives": ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor"),
    }

    def __init__(self, directory: Path):
        self._directory = directory
        self._found: set[str] = set()

    def find_spec(self, name: str, path: object, target: object = None) -> Any:  # noqa: ARG002
        if name not in self.names or name in self._found:
            return None
        self._found.add(name)  # the search below asks all finders, this one too
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            for each in self.names[name]:
                setattr(module, each, self._wrapped(getattr(module, each)))

        loader.exec_module = execute_and_wrap
        return spec

    def _wrapped(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*arguments: Any, **options: Any) -> Any:
            _obey(self._directory, "collective", f"{_steady_activity()}: {collective.__name__}", "before")
            return collective(*arguments, **options)

        return call


def _steady_activity() -> str:
    heartbeat = sys.modules.get("thresher.observability.heartbeat")
    last = None if heartbeat is None else heartbeat.heartbeat()
    return last.activity if last is not None and last.pace == "steady" else ""


def _install(directory: Path) -> None:
    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = str(Path(f"/proc/self/fd/{number}").readlink())
        _obey(directory, "fsync", path, "before")
        _fsync(descriptor)
        _obey(directory, "fsync", path, "after")

    def moving(move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Any, target: Any, **options: Any) -> None:
            _obey(directory, "rename", str(target), "before")
            move(source, target, **options)
            _obey(directory, "rename", str(target), "after")

        return moved

    os.fsync, os.rename, os.replace = fsync, moving(_rename), moving(_replace)
    sys.meta_path.insert(0, _Collectives(directory))


if "CHAOS_ORDERS" in os.environ:
    _install(Path(os.environ["CHAOS_ORDERS"]))
