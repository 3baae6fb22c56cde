"""Copies of tensors for a save in the background, made while training continues."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostBuffers:
    """Copies of tensors in host memory; buffers are reused, because allocating pages costs as much as the copy.

    Tensors of a GPU are copied on a stream of their own, and the host does not wait for it. Whoever changes them calls
    `hold_changes` first, and whoever reads the buffers calls `wait`.
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
            copied = {
                name: self._buffer(name, tensor).copy_(tensor, non_blocking=True) for name, tensor in tensors.items()
            }
            self._copied = stream.record_event()
        for tensor in on_gpu:
            tensor.record_stream(stream)  # its memory is not given to others before it is copied
        self._may_change = False
        return copied

    def hold_changes(self) -> None:
        """Let the work of the GPU from here on start after the copies; the host does not wait."""
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
