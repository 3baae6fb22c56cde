"""Configs of other trainers: `thresher import`, ROLL's configs in `thresher train`, and TRL's names in Python."""

from __future__ import annotations

from thresher import foreign_names


def install() -> None:
    """Let configs accept and explain the names of other trainers."""
    foreign_names.install("thresher.importers.names")
