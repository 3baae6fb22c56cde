"""Count what a step does, operation by operation: live bytes, collectives, FLOPs, and reads of device data by the host.

The counters are dispatch modes, for real tensors and for the fake ones of a simulation. In a simulation, `HostSide`
computes on the host and pretends to compute on the device: what a step reads back is counted and gets a value.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from thresher.plan.simulate.request import Kind

# for an all-gather count the output, for every other collective the input
_NAMES: dict[Kind, tuple[str, ...]] = {
    "all_gather": ("_allgather_base_", "allgather_", "all_gather_into_tensor"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_tensor"),
    "all_reduce": ("allreduce_", "all_reduce", "all_reduce_"),
    "all_to_all": ("alltoall_base_", "all_to_all_single"),
    "broadcast": ("broadcast_",),
    "send": ("send",),
    "receive": ("recv_",),
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
_WITHOUT_PAYLOAD = {"wait_tensor", "barrier", "_wrap_tensor_autograd"}
_aten = torch.ops.aten
_SCALAR_READS = {_aten._local_scalar_dense.default, _aten.item.default}
# their results, or the sizes of them, depend on values
_OF_VALUES = (_aten.equal, _aten.is_nonzero, _aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_dim)
_READS = _SCALAR_READS | {each.default for each in _OF_VALUES}
_PACKAGE = str(Path(__file__).resolve().parents[2])
_OWN = str(Path(__file__).resolve().parent)


def _grouped_product(left: Any, right: Any, *_rest: Any, **_options: Any) -> int:
    """FLOPs of rows times stacked matrices, or of the gradient of these; torch has no formula."""
    rows, inner = left.shape[-2:]
    return int(2 * rows * inner * right.shape[-1])


_FORMULAS = {**flop_registry, _aten._grouped_mm: _grouped_product}


class LiveBytes(TorchDispatchMode):
    """Live and peak bytes of the storages that operations return and of tensors given to `add`, on a device type."""

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
        resize = self._resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            made = resize(storage, size)
            if id(storage) in self._sizes:
                self._count(id(storage), storage.nbytes())
            return made

        # FSDP2 frees gathered weights in this way
        torch.UntypedStorage.resize_ = cast("Any", resize_and_count)  # type: ignore[method-assign]
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
    """Let DTensor derive the shape of a result outside of all modes."""
    # with tensors of the whole shape that have no memory, which only in a simulation are like all others
    derive = ShardingPropagator._propagate_tensor_meta_non_cached

    def derive_uncounted(propagator: ShardingPropagator, operation: Any) -> Any:
        with _disable_current_modes():
            return derive(propagator, operation)

    ShardingPropagator._propagate_tensor_meta_non_cached = derive_uncounted  # type: ignore[assignment,method-assign]


class Collective(NamedTuple):
    """A kind of collective in a group of processes."""

    kind: Kind
    ranks: tuple[int, ...]  # of its process group, in the world
    device: str  # type of the device of the payload
    is_of_numbers: bool = False  # the payload is in fp64, so it is not a tensor of the model
    is_functional: bool = False  # of DTensor and of cp, in which a graph can see it


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
                # (output, input, group, ...) in c10d where there are two tensors
                first = args[1] if name in ("_reduce_scatter_base_", "alltoall_base_") else args[0]
                payload = made if kind == "all_gather" and is_functional else first
                tensors = [tensor for tensor in tree_leaves(payload) if isinstance(tensor, Tensor)]
                collective = Collective(
                    kind,
                    tuple(get_process_group_ranks(_group_of(args))),
                    tensors[0].device.type,
                    tensors[0].dtype == torch.float64,
                    is_functional,
                )
                self.calls_of[collective] += 1
                self.payloads[collective] += sum(tensor.nbytes for tensor in tensors)
        return made


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
            if (count := _FORMULAS.get(func.overloadpacket)) is not None:
                self.flops[str(tensors[0].dtype).removeprefix("torch.")] += count(*args, **(kwargs or {}), out_val=made)
        return made


class HostSide(TorchDispatchMode):
    """Keeps tensors of the host real, because lengths and indices are read from them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # by file and line, how often the host waits for the device: a scalar is read, a size depends on values, or a
        # copy is not asynchronous
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
        self.reads[_calling_line()] += tensor.device.type != "cpu"  # of what was copied before, there is no wait
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
            self.reads[_calling_line()] += 1


def _is_pinned(tensor: Tensor) -> bool:
    """Whether a copy from or to a tensor can be asynchronous: on the device, or in pinned memory of the host."""
    return tensor.device.type != "cpu" or getattr(tensor, "is_page_locked", False)


def _stays_on_host(func: Any, tensors: list[Tensor], kwargs: Any) -> bool:
    """Whether an operation without fake tensors has its inputs and its result on the host."""
    if func.namespace == "prim" or any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


def _calling_line() -> str:
    """File and line of the innermost function of this package that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(_OWN):
            return f"{file.removeprefix(_PACKAGE).lstrip('/')}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of thresher"
