"""Inject faults at a given call inside a process. Python imports a module of this name at start-up.

CHAOS_ORDERS names a directory. An order in it, a JSON file, gives the call (`fsync`, `rename`), the path and the
action: `kill` kills the first process that reaches the call, and removes the order; `sleep` delays all processes for as
long as the order exists.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    os.kill(os.getpid(), signal.SIGKILL)


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


if "CHAOS_ORDERS" in os.environ:
    _install(Path(os.environ["CHAOS_ORDERS"]))
