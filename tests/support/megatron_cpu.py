"""The torch.cuda calls of megatron-core, answered by the CPU, so that the strategy for GPUs runs in tests.

`use_cpu_as_cuda` changes torch in this process only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "full", "ones", "rand", "tensor", "zeros")


class _Stream:
    """A stream or an event: work on a CPU is done when the call returns."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self


@functools.cache
def use_cpu_as_cuda() -> None:
    """Let torch.cuda name the CPU: its device, streams, random numbers and tensors."""
    # first: it imports torch.compile, which lists torch's functions
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    cuda: Any = torch.cuda
    stream = _Stream()
    # a function for each name: torch.compile has rules by function
    for owner, name, answer in (
        (cuda, "current_device", lambda: CPU),
        (cuda, "current_stream", lambda: stream),
        (cuda, "default_stream", lambda: stream),
        (cuda, "stream", contextlib.nullcontext),
        (cuda, "get_rng_state", torch.get_rng_state),
        (cuda.random, "get_rng_state", torch.get_rng_state),
        (cuda, "manual_seed", torch.manual_seed),
        (cuda, "set_device", lambda: None),
        (cuda, "synchronize", lambda: None),
        (cuda, "empty_cache", lambda: None),
    ):
        takes_argument = name in ("manual_seed", "stream")
        setattr(owner, name, _answering(answer, takes_argument))
    cuda.Stream = cuda.Event = _Stream
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    torch.Tensor.type = _type_of(torch.Tensor.type)  # type: ignore[assignment, method-assign]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # the queue of calls that wait for a GPU would keep every state
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host


def _answering(answer: Callable[..., Any], takes_argument: bool) -> Callable[..., Any]:
    return lambda *args, **_: answer(*args[:1]) if takes_argument else answer()


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **rest: Any) -> Any:
        return factory(*args, device=CPU if str(device).startswith("cuda") else device, **rest)

    return make


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron-Core's copy to the host, which it skips for tensors that are there."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _type_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """The name of a tensor's type, for which the optimizers of megatron-core look."""

    def type_of(tensor: torch.Tensor, *args: Any, **rest: Any) -> Any:
        found = original(tensor, *args, **rest)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    return type_of
