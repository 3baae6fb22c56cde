"""The part of every trained parameter that this process updates: consecutive elements of the flattened parameter.

Stage 0 updates whole parameters on every process. Stages 1 and 2 concatenate the parameters of a group and give each
rank an equal part, so that a parameter may be divided between two ranks. Stage 3 gives each rank an equal part of every
parameter. Parts of stages 1 to 3 lie in flat tensors, on which the optimizer works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from thresher.strategies.deepspeed.optimizer import PartitionedAdamW


@dataclass(frozen=True)
class Partition:
    """Elements [start, start + numel) of a parameter, which are those from `offset` in `flat`.

    flat: what the optimizer updates, and the key of its state. gradient: reads the reduced gradient of these elements,
    from the last backward of a step until the optimizer step.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    flat: Tensor
    offset: int
    gradient: Callable[[], Tensor | None]

    @property
    def weight(self) -> Tensor:
        """The elements as they are in fp32, 1-D; shares memory with the flat tensor."""
        return self.in_flat(self.flat.detach())

    def in_flat(self, tensor: Tensor) -> Tensor:
        """This partition of a tensor that is laid out like the flat one, 1-D."""
        return tensor.view(-1).narrow(0, self.offset, self.numel)


def find_partitions(
    stage: int, optimizer: Any, parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]]
) -> list[Partition]:
    """List what this process updates of some trained parameters; shapes: of whole parameters.

    optimizer: that of the DeepSpeed engine.
    """
    find = _whole if stage == 0 else _of_flat_group if stage < 3 else _of_flat_parameter
    return [part for name, parameter in parameters.items() for part in find(optimizer, name, parameter, shapes[name])]


def flat_tensors(partitions: list[Partition]) -> list[Tensor]:
    """The flat tensors of some partitions, each once."""
    return list({id(each.flat): each.flat for each in partitions}.values())


def _whole(_: PartitionedAdamW, name: str, parameter: nn.Parameter, shape: tuple[int, ...]) -> Iterator[Partition]:
    def gradient() -> Tensor | None:
        return None if parameter.grad is None else parameter.grad.view(-1)

    yield Partition(name, shape, 0, parameter.numel(), parameter, 0, gradient)


def _of_flat_group(zero: Any, name: str, parameter: Any, shape: tuple[int, ...]) -> Iterator[Partition]:
    fragment = parameter._hp_mapping  # of the parameter in this rank's flat tensor; the public safe_get_* read it too
    if fragment is not None:
        flat = zero.single_partition_of_fp32_groups[fragment.param_group_index]
        inside, position = fragment.lp_fragment_address, fragment.hp_fragment_address
        index = parameter._index_in_param_group

        def gradient() -> Tensor:
            found: Tensor = fragment.get_lp_grad_fragment(index)
            return found.view(-1)

        yield Partition(name, shape, inside.start, inside.numel, flat, position.start, gradient)


def _of_flat_parameter(zero: Any, name: str, parameter: Any, shape: tuple[int, ...]) -> Iterator[Partition]:
    group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
    start = parameter.ds_zero_partition_rank * size
    numel = min(size, parameter.ds_numel - start)  # the last ranks have padding
    if numel > 0:

        def gradient() -> Tensor:
            found: Tensor = zero.get_local_fp32_grad_for_param(parameter)
            return found.view(-1)[:numel]

        yield Partition(name, shape, start, numel, zero.fp32_partitioned_groups_flat[group], offset, gradient)
