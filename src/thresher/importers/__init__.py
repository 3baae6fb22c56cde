"""Configs of other trainers: `thresher import`, ROLL's configs in `thresher train`, and TRL's names in Python.

A tool around a run: nothing that trains imports it.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from thresher import foreign_names


def install() -> None:
    """Let configs accept and explain the names of other trainers."""
    # a module with the functions that the class has as methods
    foreign_names.install(lambda: cast("foreign_names.ForeignNames", import_module("thresher.importers.names")))
