"""Read the next step while the current one trains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

Step = TypeVar("Step")


class ReadAhead(Generic[Step]):
    """Reads one step ahead, in a thread that ends when the step is read.

    `read` only reads files: it runs no model and draws no random numbers, so steps are the same without the thread. An
    error of the thread is raised when its step is taken.
    """

    def __init__(self, read: Callable[[int], Step], device: torch.device) -> None:
        self._read, self._device = read, device
        self._thread: ThreadPoolExecutor | None = None
        self._next: tuple[int, Future[Step]] | None = None

    def take(self, step: int) -> Step:
        """Return a step, waiting for the thread if it reads this one; else read it here."""
        self.wait()
        number, result = self._next or (None, None)
        self._next = None
        return self._read(step) if result is None or number != step else result.result()

    def start(self, step: int) -> None:
        """Start to read a step."""
        self._thread = ThreadPoolExecutor(1, "read-ahead", initializer=self._choose_device)
        self._next = step, self._thread.submit(self._read, step)
        self._thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the thread has ended; its step is kept."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _choose_device(self) -> None:
        if self._device.type == "cuda":  # a new thread would pin memory, and copy it, for the first GPU
            torch.cuda.set_device(self._device)
