"""The rows of tables."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A heading and the texts beside it. differs: the runs that are compared do not agree."""

    heading: str
    cells: list[str]
    differs: bool = False
