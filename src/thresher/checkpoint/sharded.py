"""Parts of tensors: what one process of several writes of a tensor that they hold together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from thresher.distributed.sharded_tensor import local_slices, to_local

T = TypeVar("T")


@dataclass(frozen=True)
class TensorShard:
    """Values that lie at `offset` in a whole tensor of `shape`."""

    values: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, like: Tensor) -> TensorShard:
        """This process's part of a tensor; `like` is a tensor that is split as the one that these values are of."""
        offset = tuple(place.start for place in local_slices(like))
        return cls(to_local(tensor).detach(), tuple(like.shape), offset)

    @property
    def is_whole(self) -> bool:
        return tuple(self.values.shape) == self.shape


@dataclass(frozen=True)
class ShardFile:
    """Which of `count` files, one for each process that has something to write, is ours."""

    index: int = 0
    count: int = 1

    def name(self, stem: str) -> str:
        """One file has the plain name, so that a checkpoint of one process is read by any safetensors reader."""
        if self.count == 1:
            return f"{stem}.safetensors"
        return f"{stem}-{self.index + 1:05d}-of-{self.count:05d}.safetensors"


class Communicator(Protocol):
    """The processes that save together."""

    @property
    def rank(self) -> int: ...

    def all_gather_object(self, value: T) -> list[T]:
        """Give every process the values of all, in the order of the ranks."""
        ...


class HostBuffers:
    """Copies in host memory that outlive the step; the memory is kept, for new pages cost as much as the copying."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = tensor.new_empty(tensor.shape, device="cpu", pin_memory=tensor.is_cuda)
            self._kept[name] = kept
        return kept.copy_(tensor)


def shards_to_write(
    tensors: Mapping[str, Tensor], places: Mapping[str, Tensor], is_ours: Callable[[Tensor], bool]
) -> dict[str, TensorShard]:
    """The parts that this process writes; `places` has, under the same name, a tensor that is split as this one is."""
    parts = {name: TensorShard.of(tensor, places[name]) for name, tensor in tensors.items() if is_ours(places[name])}
    # more processes than rows leave some without any
    return {name: part for name, part in parts.items() if part.values.numel() or part.is_whole}
