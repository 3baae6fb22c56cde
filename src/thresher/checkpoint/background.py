"""Saves in the background: copies of tensors, and a thread that writes them while training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from thresher.checkpoint.manager import CheckpointManager
from thresher.checkpoint.save import Write
from thresher.distributed.run_on_all import Communicator


class HostBuffers:
    """Copies of tensors in host memory; buffers are reused, because allocating pages costs as much as the copy.

    GPU tensors are copied on a separate stream, and the host does not wait for it. Call `hold_changes` before changing
    them, and `wait` before reading the buffers.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._may_change = True

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy tensors, each into the buffer of its name; return the buffers."""
        on_gpu = [tensor for tensor in tensors.values() if tensor.is_cuda]
        if not on_gpu:
            return {name: self._buffer(name, tensor).copy_(tensor) for name, tensor in tensors.items()}
        stream = self._stream = self._stream or torch.cuda.Stream(on_gpu[0].device)
        stream.wait_stream(torch.cuda.current_stream(on_gpu[0].device))
        with torch.cuda.stream(stream):
            # one by one: a new buffer is pinned while the copy before it runs
            copied = {
                name: self._buffer(name, tensor).copy_(tensor, non_blocking=True) for name, tensor in tensors.items()
            }
            self._copied = stream.record_event()
        for tensor in on_gpu:
            tensor.record_stream(stream)  # its memory is not reused before it is copied
        self._may_change = False
        return copied

    def hold_changes(self) -> None:
        """Let later GPU work start after the copies; the host does not wait."""
        if self._stream is not None and self._copied is not None and not self._may_change:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
            self._may_change = True

    def wait(self) -> None:
        """Wait until the buffers have their values."""
        if self._copied is not None:
            self._copied.synchronize()

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            buffer = self._buffers[name] = buffer.pin_memory() if tensor.is_cuda else buffer
        return buffer


class AsyncSaver:
    """Write a snapshot in a thread while training continues; at most one save is pending.

    An error is raised at the next step, the next save or the end of the run, whichever comes first.
    Its thread has a separate communicator, so its collectives cannot interleave with training's. All ranks call
    `make_communicator` at their first save. The thread is not a daemon: the process waits for a pending save.
    """

    def __init__(self, manager: CheckpointManager, make_communicator: Callable[[], Communicator]):
        self._manager = manager
        self._make_communicator = make_communicator
        self._communicator: Communicator | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[Path] | None = None
        self.copies = HostBuffers()

    def submit(self, step: int, write: Write, metrics: Mapping[str, float]) -> None:
        """Start a save; call `wait` first."""
        if self._pending is not None:
            raise RuntimeError("a save is pending; call wait() first")
        self._communicator = self._communicator or self._make_communicator()
        self._thread = self._thread or ThreadPoolExecutor(1, "save")
        self._pending = self._thread.submit(self._manager.save, step, write, metrics, self._communicator)

    def wait(self) -> None:
        """Wait for the pending save, if any, and raise its error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def check(self) -> None:
        """Raise the error of a finished save; do not wait for an unfinished one."""
        if self._pending is not None and self._pending.done():
            self.wait()
