"""Length histogram: exact percentiles and length bias without storing a length per pair."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from thresher.data.prepare.findings import LengthBias
from thresher.data.prepare.report import PERCENTILES
from thresher.data.store.reader import Lengths

_COLUMNS = ("prompt", "chosen", "rejected", "total")


class LengthHistogram:
    """Number of pairs per length in tokens; memory grows with the longest pair, not with the number of pairs."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        counts: Mapping[str, Mapping[str, int]] = state["counts"] if state else {}
        self._counts = {
            name: Counter({int(length): count for length, count in counts.get(name, {}).items()}) for name in _COLUMNS
        }
        self._num_chosen_longer = int(state["num_chosen_longer"]) if state else 0
        self._num_equal = int(state["num_equal"]) if state else 0

    def add(self, lengths: Lengths) -> None:
        """Count pairs; `lengths` is [pairs, (prompt, chosen, rejected)]."""
        prompt, chosen, rejected = lengths.T
        for name, column in zip(_COLUMNS, (prompt, chosen, rejected, prompt + lengths[:, 1:].max(axis=1)), strict=True):
            values, counts = np.unique(column, return_counts=True)
            self._counts[name].update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self._num_chosen_longer += int(np.count_nonzero(chosen > rejected))
        self._num_equal += int(np.count_nonzero(chosen == rejected))

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, as JSON values."""
        return {
            "counts": {name: dict(counts) for name, counts in self._counts.items()},
            "num_chosen_longer": self._num_chosen_longer,
            "num_equal": self._num_equal,
        }

    def percentiles(self) -> dict[str, tuple[int, ...]]:
        """Return token counts at `PERCENTILES`, each the length of an actual pair (not interpolated)."""
        return {name: _percentiles(counts) for name, counts in self._counts.items()}

    def length_to_keep(self, share: float, dropped: Counter[int]) -> int:
        """Return the smallest length that this share of all pairs does not exceed, including dropped ones."""
        counts = self._counts["total"] + dropped
        lengths = sorted(counts)
        ends = np.cumsum([counts[length] for length in lengths])
        return lengths[int(np.searchsorted(ends, math.ceil(share * int(ends[-1]))))]

    def bias(self) -> LengthBias:
        """Compare the lengths of chosen and rejected responses."""
        num_pairs = self._counts["total"].total()
        chosen, rejected = (
            sum(length * count for length, count in self._counts[side].items()) / num_pairs
            for side in ("chosen", "rejected")
        )
        return LengthBias(self._num_chosen_longer / num_pairs, self._num_equal / num_pairs, chosen, rejected)


def _percentiles(counts: Counter[int]) -> tuple[int, ...]:
    lengths = sorted(counts)
    ends = np.cumsum([counts[length] for length in lengths])
    # index into the sorted lengths, rounded down as in numpy.percentile(method="lower")
    indices = [int((int(ends[-1]) - 1) * (percentile / 100)) for percentile in PERCENTILES]
    return tuple(lengths[int(np.searchsorted(ends, index, side="right"))] for index in indices)
