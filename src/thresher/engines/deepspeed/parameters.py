"""Trained parameters under DeepSpeed: this process's partitions, their gradients, AdamW and checkpoint files.

DeepSpeed reduces gradients in the last backward of a step: stages 0 to 2 sum them, and stage 3, which can only average,
leaves a factor to the optimizer.

Each rank writes the elements that it updates, without gathering, and reads them back for any number of ranks, stage or
engine that wrote the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thresher.checkpoint.state import STEM, check_groups, check_specs
from thresher.checkpoint.tensor_files import FlatShard, Shard, ShardedReader
from thresher.distributed.groups import Group
from thresher.distributed.tensors import local_slices
from thresher.engines.native.parameters import count_zeros, squared_norm
from thresher.engines.policy_files import ADAMW, OPTIMIZER, RESUME_HINT, adamw_groups, adamw_values
from thresher.errors import CheckpointError

_STEP = "step"


class PartitionedAdamW(torch.optim.AdamW):
    """AdamW on the partitions of a ZeRO stage.

    DeepSpeed drives it: it hands over flat partitions with their reduced gradients, one group at a time. It would clip
    with its own formula and decide itself whether to skip a step. Both are decided before, from the whole model's
    gradient norm, and applied here. After a skipped step DeepSpeed copies partitions that have not changed, and drops
    the gradients, as after any step.
    """

    # of the next step; None skips it
    gradient_factor: float | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.gradient_factor is None:
            return None
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients and self.gradient_factor != 1.0:
            torch._foreach_mul_(gradients, self.gradient_factor)
        return super().step(closure)


@dataclass(frozen=True)
class Partition:
    """Elements [start, start + numel) of a parameter, which begin at `offset` in `flat`.

    Stage 0 updates whole parameters on every process. Stages 1 and 2 concatenate the parameters of a group and give
    each rank an equal part, so a parameter may be divided between two ranks. Stage 3 gives each rank an equal part of
    every parameter. Parts of stages 1 to 3 lie in flat tensors, on which the optimizer works.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    # what the optimizer updates, and the key of its state
    flat: Tensor
    offset: int
    # reads the reduced gradient of these elements, from the last backward of a step until the optimizer step
    gradient: Callable[[], Tensor | None]

    @property
    def weight(self) -> Tensor:
        """The elements as they are in fp32, 1-D; shares memory with the flat tensor."""
        return self.in_flat(self.flat.detach())

    def in_flat(self, tensor: Tensor) -> Tensor:
        """This partition of a tensor that is laid out like the flat one, 1-D."""
        return tensor.view(-1).narrow(0, self.offset, self.numel)

    def shard(self, values: Tensor) -> FlatShard:
        return FlatShard(values.detach(), self.shape, self.start)


def find_partitions(
    stage: int, optimizer: Any, parameters: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]]
) -> list[Partition]:
    """List what this process updates, of the trained parameters by name and the shapes of whole ones."""
    find = _whole if stage == 0 else _of_flat_group if stage < 3 else _of_flat_parameter
    return [part for name, parameter in parameters.items() for part in find(optimizer, name, parameter, shapes[name])]


def _whole(_: PartitionedAdamW, name: str, parameter: nn.Parameter, shape: tuple[int, ...]) -> Iterator[Partition]:
    def gradient() -> Tensor | None:
        return None if parameter.grad is None else parameter.grad.view(-1)

    yield Partition(name, shape, 0, parameter.numel(), parameter, 0, gradient)


def _of_flat_group(zero: Any, name: str, parameter: Any, shape: tuple[int, ...]) -> Iterator[Partition]:
    fragment = parameter._hp_mapping  # of the parameter in this rank's flat tensor; the public safe_get_* read it too
    if fragment is not None:
        flat = zero.single_partition_of_fp32_groups[fragment.param_group_index]
        inside, position = fragment.lp_fragment_address, fragment.hp_fragment_address
        index, read = parameter._index_in_param_group, fragment.get_lp_grad_fragment
        yield Partition(name, shape, inside.start, inside.numel, flat, position.start, lambda: read(index).view(-1))


def _of_flat_parameter(zero: Any, name: str, parameter: Any, shape: tuple[int, ...]) -> Iterator[Partition]:
    group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
    start = parameter.ds_zero_partition_rank * size
    numel = min(size, parameter.ds_numel - start)  # the last ranks have padding
    if numel > 0:
        flat, read = zero.fp32_partitioned_groups_flat[group], zero.get_local_fp32_grad_for_param
        yield Partition(name, shape, start, numel, flat, offset, lambda: read(parameter).view(-1)[:numel])


class PartitionedParameters:
    """The partitions of this process, with the factor that scales their gradients in the next step."""

    def __init__(self, engine: Any, optimizer: PartitionedAdamW, partitions: list[Partition], world: Group, stage: int):
        self.engine, self.optimizer, self.partitions = engine, optimizer, partitions
        self.world, self.stage = world, stage
        # times the reduced gradient is the sum over ranks
        self._sum_factor = float(world.size) if stage == 3 else 1.0
        self._factor = self._sum_factor
        self._has_gradients = False

    @property
    def owned(self) -> list[Partition]:
        """The partitions that this process measures and writes; at stage 0, every process has the same ones."""
        return self.partitions if self.stage > 0 or self.world.rank == 0 else []

    def reduce_gradients(self) -> None:
        self._factor = self._sum_factor
        self._has_gradients = True

    def count_zeros(self) -> Tensor | float:
        return count_zeros(self._owned_gradients())

    def scale(self, factor: float) -> None:
        self._factor *= factor

    def squared_norm(self) -> Tensor | float:
        return squared_norm(self._owned_gradients(), self._factor)

    def update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.gradient_factor = self._factor
        self.engine.step()
        self._has_gradients = False

    def zero_grad(self) -> None:
        if self._has_gradients:  # of a step that is skipped
            self.optimizer.gradient_factor = None
            self.engine.step()
            self._has_gradients = False

    def weights(self) -> Mapping[str, Tensor]:
        """This rank's part of each parameter, flattened; a rank may have no part of some."""
        return {each.name: each.weight for each in self.partitions}

    def _owned_gradients(self) -> list[Tensor]:
        return [gradient for each in self.owned if (gradient := each.gradient()) is not None]


@dataclass(frozen=True)
class PartitionedCheckpoint:
    """The elements that this process updates, in the checkpoint."""

    parameters: PartitionedParameters
    # the trained parameters by name, and their whole shapes
    trained: Mapping[str, nn.Parameter]
    shapes: Mapping[str, tuple[int, ...]]

    def weight_shards(self, extra: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Shard]]:
        if extra:  # the check rejects a synced reference
            raise ValueError(f"DeepSpeed cannot save the tensors {', '.join(extra)}")
        return {STEM: {each.name: each.shard(each.weight) for each in self.parameters.owned}}

    def optimizer_shards(self) -> tuple[dict[str, Shard], dict[str, Any] | None]:
        state = self.parameters.optimizer.state
        moments: dict[str, Shard] = {
            f"{key}/{each.name}": each.shard(each.in_flat(value))
            for each in self.parameters.owned
            for key, value in state.get(each.flat, {}).items()
            if key != _STEP
        }
        if self.parameters.world.rank > 0:
            return moments, None
        steps = self._step_counts()
        moments |= {f"{_STEP}/{name}": FlatShard(step.view(1), (), 0) for name, step in steps.items()}
        return moments, adamw_values(self._shapes, steps)

    @torch.no_grad()
    def load(self, directory: Path, values: dict[str, Any]) -> None:
        specs = {name: (tuple(shape), torch.float32) for name, shape in self._shapes.items()}
        with ShardedReader(directory, STEM) as reader:
            check_specs(directory, reader.specs(), specs, hint=RESUME_HINT, other_rank_names=())
            check_groups(values, ADAMW, adamw_groups(self._shapes), ())
            self._load_weights(reader)
        with ShardedReader(directory, OPTIMIZER) as stored:
            self._load_moments(stored, directory)

    @property
    def _shapes(self) -> dict[str, list[int]]:
        return {name: list(self.shapes[name]) for name in self.trained}

    def _step_counts(self) -> dict[str, Tensor]:
        """The number of updates of each parameter; empty before the first one."""
        state = self.parameters.optimizer.state
        found = {each.name: state[each.flat][_STEP] for each in self.parameters.partitions if state.get(each.flat)}
        if not found:
            return {}
        # rank 0 may have no elements of a parameter, and every parameter has the same count
        count = next(iter(found.values()))
        return {name: found.get(name, count) for name in self._shapes}

    def _load_weights(self, reader: ShardedReader) -> None:
        zero = self.parameters.engine.optimizer
        if self.parameters.stage < 3:  # every rank has whole parameters besides its partition
            reader.read_into({name: (each, local_slices(each)) for name, each in self.trained.items()})
        else:
            zero.empty_partition_cache()  # parameters that stay gathered are gathered again
            for each in self.parameters.partitions:
                partitioned: Any = self.trained[each.name]
                partitioned.ds_tensor.view(-1)[: each.numel].copy_(
                    reader.read_flat(each.name, each.start, each.start + each.numel)
                )
        if self.parameters.stage > 0:
            zero.refresh_fp32_params()

    def _load_moments(self, stored: ShardedReader, directory: Path) -> None:
        names = set(stored)
        counts = {float(stored.read(f"{_STEP}/{name}")) for name in self._shapes if f"{_STEP}/{name}" in names}
        has_all = all(f"{_STEP}/{name}" in names for name in self._shapes)
        if counts and (len(counts) > 1 or not has_all):
            raise CheckpointError(
                f"the optimizer in {directory} has updated some parameters more often than others, which DeepSpeed "
                "cannot continue; resume with strategy_name fsdp2_train"
            )
        state = self.parameters.optimizer.state
        state.clear()
        if not counts:
            return
        (count,) = counts
        keys = sorted({name.partition("/")[0] for name in names} - {_STEP})
        for flat in {id(each.flat): each.flat for each in self.parameters.partitions}.values():
            state[flat] = {_STEP: torch.tensor(count, device=flat.device)}
            state[flat] |= {key: torch.zeros_like(flat, requires_grad=False) for key in keys}
        for each in self.parameters.partitions:
            for key in keys:
                values = stored.read_flat(f"{key}/{each.name}", each.start, each.start + each.numel)
                each.in_flat(state[each.flat][key]).copy_(values)
