"""Curriculum: the examples of an epoch in the order of a key, the least or the greatest first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from thresher.data.store.joined import Stores
from thresher.data.store.split import in_blocks
from thresher.errors import UserError

logger = logging.getLogger(__name__)

Key = Literal["length", "margin", "column"]


@dataclass(eq=False)
class Curriculum:
    """Sorts the examples of each epoch when its first step is needed: 8 bytes per example of the newest two."""

    store: Stores
    key: Key
    descending: bool
    _sorted: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)  # the newest two epochs

    def __post_init__(self) -> None:
        parts = self.store.parts.items()
        lacking = {
            "length": [],
            "margin": [name for name, each in parts if "margin" not in each.columns_in_use],
            "column": [name for name, each in parts if "order" not in each.extra_columns],
        }[self.key]
        if self.key == "margin" and len(lacking) == len(parts):
            raise UserError(
                f"data_args.order is margin, and no pair of {self.store.path} has one; write a column `margin`, or set "
                "data_args.margin_from_scores=true for rows with scores"
            )
        if self.key == "column" and lacking:
            raise UserError(
                f"data_args.order is column, and the store of {lacking[0]} has none; prepare it again with "
                "columns.order, the name of a column with numbers"
            )
        if self.key == "margin" and lacking:
            logger.warning("pairs of %s have no margin and are sorted as if it was 0", ", ".join(lacking))

    @property
    def order(self) -> str:
        return f"{'-' if self.descending else ''}{self.key}"

    def in_epoch(self, epoch: int, shuffled: Callable[[], npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """Sort the examples of an epoch; of equal ones, the shuffled order decides."""
        if epoch not in self._sorted:
            ids = shuffled()
            keys = self._keys()[ids]
            newest = dict(list(self._sorted.items())[-1:])  # a reference works ahead, into the next epoch
            self._sorted = {**newest, epoch: ids[np.argsort(-keys if self.descending else keys, kind="stable")]}
        return self._sorted[epoch]

    def _keys(self) -> npt.NDArray[Any]:
        if self.key == "margin":
            return self.store.column("margin", np.dtype("<f4"))
        if self.key == "column":
            return self.store.column("order", np.dtype("<f8"))
        return np.concatenate([block.sum(axis=1, dtype=np.int64) for block in in_blocks(self.store.lengths)])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_sorted": {}}
