"""Mapped files of which only so many are open at once: those that were read last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Opened = TypeVar("Opened")
# each mapped shard holds a file descriptor; common limits allow 1024 of them, and a run maps those of a store, its
# held-out pairs and the reference's logps
MAX_OPEN_SHARDS = 256


class OpenShards(Generic[Opened]):
    """Shards by their number, opened when they are asked for."""

    def __init__(self, open_shard: Callable[[int], Opened]) -> None:
        self._open_shard = open_shard
        self._shards: OrderedDict[int, Opened] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, number: int) -> Opened:
        if number in self._shards:
            self._shards.move_to_end(number)
            return self._shards[number]
        if len(self._shards) >= MAX_OPEN_SHARDS:
            self._shards.popitem(last=False)
        self._shards[number] = self._open_shard(number)
        return self._shards[number]
