"""Work that all processes of a group do together: which of them does what, and an error of one raised on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

from thresher.errors import UserError, WorkerLostError

T = TypeVar("T")


class Communicator(Protocol):
    """Processes that can exchange values."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        ...

    def gather_object(self, value: T) -> list[T] | None:
        """Return the values of all ranks, in rank order, on rank 0; None on the other ranks."""
        ...


def run_on_all(communicator: Communicator, function: Callable[[], T], what: str) -> list[T]:
    """Call a function on every rank and return all results; an error on one rank is raised on all.

    A `UserError` is raised as it is. Any other counts on other ranks as a lost worker, which failed to do `what`: the
    run may restart.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as raised:
        error = raised
    for_peers = error
    if error is not None and not isinstance(error, UserError):
        for_peers = WorkerLostError(f"a worker failed to {what}: {error!r}")
    gathered = communicator.all_gather_object((result, for_peers))
    if error is not None:
        raise error
    for _, peer_error in gathered:
        if peer_error is not None:
            raise peer_error
    return [each for each, _ in gathered]  # type: ignore[misc]


def divide_by_size(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Assign consecutive items to ranks, so all have about the same total size; return the rank of each item."""
    total = max(1, sum(sizes))
    ends = accumulate(sizes)
    # by the middle of an item in the whole
    return [
        min(num_ranks - 1, num_ranks * (2 * end - size) // (2 * total)) for size, end in zip(sizes, ends, strict=True)
    ]
