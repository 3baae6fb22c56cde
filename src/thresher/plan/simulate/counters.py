"""Count what a step does, operation by operation: live bytes, collectives, FLOPs, and reads of device data by the host.

The counters are dispatch modes, for real tensors and for the fake ones of a simulation.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from thresher.plan.simulate.request import Kind

# for an all-gather count the output, for every other collective the input
_KINDS: dict[str, Kind] = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
_WITHOUT_PAYLOAD = {"wait_tensor", "barrier", "_wrap_tensor_autograd"}
_PACKAGE = str(Path(__file__).resolve().parents[2])
_OWN = str(Path(__file__).resolve().parent)


class LiveBytes(TorchDispatchMode):
    """Live and peak bytes of the storages that operations return, and of tensors given to `add`.

    device_type: count only tensors on such devices.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._device_type = device_type
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if self._device_type in (None, local.device.type):
                    self._track(local.untyped_storage())

    def __enter__(self) -> LiveBytes:
        self._resize = torch.UntypedStorage.resize_
        # FSDP2 frees gathered weights in this way
        torch.UntypedStorage.resize_ = self._resized  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # DTensor dispatches the local operations again
        made = func(*args, **(kwargs or {}))
        self.add(tree_leaves(made))
        return made

    @property
    def _resized(self) -> Any:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            made = self._resize(storage, size)
            if id(storage) in self._sizes:
                self._count(id(storage), storage.nbytes())
            return made

        return resize_

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._references or self._references[key]() is not storage:
            self._references[key] = weakref.ref(storage, lambda _: self._count(key, 0))
            self._sizes[key] = 0
        self._count(key, storage.nbytes())

    def _count(self, key: int, size: int) -> None:
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)


def leave_shapes_uncounted() -> None:
    """Let DTensor derive the shape of a result outside of all modes.

    It computes with tensors of the whole shape that have no memory, which only in a simulation are like all others.
    """
    derive = ShardingPropagator._propagate_tensor_meta_non_cached

    def derive_uncounted(propagator: ShardingPropagator, operation: Any) -> Any:
        with _disable_current_modes():
            return derive(propagator, operation)

    ShardingPropagator._propagate_tensor_meta_non_cached = derive_uncounted  # type: ignore[assignment,method-assign]


class Collective(NamedTuple):
    """ranks: of its process group, in the world. device: type of the device of the payload.

    is_of_numbers: the payload is in fp64, so it is not a tensor of the model.
    """

    kind: Kind
    ranks: tuple[int, ...]
    device: str
    is_of_numbers: bool = False


class CommunicationCounter(TorchDispatchMode):
    """Calls and bytes of every collective of this process; an unknown kind is an error."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.payloads: Counter[Collective] = Counter()
        self.calls_of: Counter[Collective] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # DTensor dispatches the local operations again
        made = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name not in _WITHOUT_PAYLOAD:
                kind = _KINDS[name]
                is_functional = func.namespace == "_c10d_functional"
                payload = made if kind == "all_gather" and is_functional else _payload(name, args)
                tensors = [tensor for tensor in tree_leaves(payload) if isinstance(tensor, Tensor)]
                ranks = tuple(get_process_group_ranks(_group_of(args)))
                collective = Collective(kind, ranks, tensors[0].device.type, tensors[0].dtype == torch.float64)
                self.calls_of[collective] += 1
                self.payloads[collective] += sum(tensor.nbytes for tensor in tensors)
        return made


def _payload(name: str, args: Any) -> Any:
    """(output, input, group, ...) in c10d where there are two tensors."""
    has_two = name in ("_reduce_scatter_base_", "alltoall_base_")
    return args[1] if has_two else args[0]


def _group_of(args: Any) -> ProcessGroup:
    """The group of a collective: an argument of c10d, named in functional collectives."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return ProcessGroup.unbox(argument)
    name: Any = next(argument for argument in reversed(args) if isinstance(argument, str))
    return _resolve_process_group(name)


class OperationCounter(TorchDispatchMode):
    """Operations on a type of device, and the FLOPs of matrix products by the dtype of their operands."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.flops: Counter[str] = Counter()
        self._device_type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        tensors = [tensor for tensor in tree_leaves((args, made)) if isinstance(tensor, Tensor)]
        if func.namespace in ("aten", "fsdp") and any(tensor.device.type == self._device_type for tensor in tensors):
            self.operations += not func.is_view
            if (count := flop_registry.get(func.overloadpacket)) is not None:
                self.flops[str(tensors[0].dtype).removeprefix("torch.")] += count(*args, **(kwargs or {}), out_val=made)
        return made


def calling_line() -> str:
    """File and line of the innermost function of this package that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(_OWN):
            return f"{file.removeprefix(_PACKAGE).lstrip('/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of thresher"
