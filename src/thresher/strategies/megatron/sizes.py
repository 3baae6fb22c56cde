"""Parallel axes of Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MegatronSizes:
    """Size of each parallel axis.

    virtual_pp: model chunks per pipeline stage. ep splits the experts over data-parallel (and cp and tp) ranks, which
    otherwise hold the same weights, so it is no factor of the number of processes.
    """

    tp: int = 1
    pp: int = 1
    virtual_pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False

    @property
    def workers_per_data_rank(self) -> int:
        return self.tp * self.pp * self.cp
