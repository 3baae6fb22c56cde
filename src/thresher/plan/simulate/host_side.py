"""Compute on the host, and pretend to compute on the device: what a step reads back is counted and gets a value."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thresher.plan.simulate.counters import calling_line

_aten = torch.ops.aten
_SCALAR_READS = {_aten._local_scalar_dense.default, _aten.item.default}
# their results, or the sizes of them, depend on values
_READS = _SCALAR_READS | {
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
}


class HostSide(TorchDispatchMode):
    """Keeps tensors of the host real, because lengths and indices are read from them.

    reads: by file and line, how often the host waits for the device: a scalar is read, a size depends on values, or a
    copy is not asynchronous.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is DTensor for kind in types):
            return NotImplemented
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)]
        fake = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if fake and func in _READS:
            return self._read(func, fake[0], args, kwargs)
        if func is _aten.empty.memory_format and kwargs.get("pin_memory"):
            # for offloaded activations, which the host does not read
            buffer = func(*args, **kwargs | {"pin_memory": False})
            buffer.is_page_locked = True
            return buffer
        if not fake and _stays_on_host(func, tensors, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        self._note_waits(func, tensors, args, kwargs)
        return func(*args, **kwargs)

    def _read(self, func: Any, tensor: FakeTensor, args: Any, kwargs: Any) -> Any:
        self.reads[calling_line()] += tensor.device.type != "cpu"  # of what was copied before, there is no wait
        if func in _SCALAR_READS:
            return {torch.bool: True}.get(tensor.dtype, 1.0 if tensor.dtype.is_floating_point else 1)
        if func in (_aten.equal.default, _aten.is_nonzero.default):
            return True
        if func is _aten.nonzero.default:  # every element
            return tensor.new_zeros((tensor.numel(), tensor.ndim), dtype=torch.int64)
        return func(*args, **kwargs)

    def _note_waits(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> None:
        if func is _aten._to_copy.default:
            target = kwargs.get("device")
            is_crossing = target is not None and torch.device(target).type != tensors[0].device.type
            is_waiting = is_crossing and not (kwargs.get("non_blocking") and _is_pinned(tensors[0]))
        elif func is _aten.copy_.default:
            is_crossing = args[0].device.type != args[1].device.type
            is_asynchronous = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            is_waiting = is_crossing and not (is_asynchronous and all(map(_is_pinned, args[:2])))
        else:
            # without `unsafe`, segment_reduce compares the lengths with the data
            is_waiting = func is _aten.segment_reduce.default and not kwargs.get("unsafe")
        if is_waiting:
            self.reads[calling_line()] += 1


def _is_pinned(tensor: Tensor) -> bool:
    """Whether a copy from or to a tensor can be asynchronous: on the device, or in pinned memory of the host."""
    return tensor.device.type != "cpu" or getattr(tensor, "is_page_locked", False)


def _stays_on_host(func: Any, tensors: list[Tensor], kwargs: Any) -> bool:
    """Whether an operation without fake tensors has its inputs and its result on the host."""
    if func.namespace == "prim" or any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"
