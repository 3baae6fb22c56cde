"""Weights and optimizer state of a policy under DeepSpeed, in the files of every other engine.

Each rank writes the elements that it updates, without gathering, and reads them back for any number of ranks, stage or
engine that wrote the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.save import Write
from thresher.checkpoint.state import STEM, check_groups, check_specs
from thresher.checkpoint.tensor_files import FlatShard, Shard, ShardedReader
from thresher.distributed.groups import Group
from thresher.errors import CheckpointError
from thresher.strategies.deepspeed.optimizer import PartitionedAdamW
from thresher.strategies.deepspeed.partitions import Partition, flat_tensors
from thresher.strategies.loss_scale import LossScale
from thresher.strategies.policy_files import OPTIMIZER, load_loss_scale, with_loss_scale, write_policy

_STEP = "step"
_TYPE = "AdamW"  # of the state: that of torch, however it is partitioned


class PartitionedCheckpoint:
    """Saves and loads the weights, the optimizer state and the loss scale of a partitioned policy."""

    def __init__(
        self,
        engine: Any,
        optimizer: PartitionedAdamW,
        parameters: Mapping[str, nn.Parameter],
        shapes: Mapping[str, tuple[int, ...]],
        partitions: list[Partition],
        world: Group,
        stage: int,
        loss_scale: LossScale | None,
    ):
        """parameters: those that are trained, by name; shapes: of the whole parameters."""
        self._engine, self._optimizer, self._parameters = engine, optimizer, parameters
        self._shapes = {name: shapes[name] for name in parameters}
        self._partitions, self._world, self._stage, self._loss_scale = partitions, world, stage, loss_scale

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None) -> Write:
        """Capture everything at this step; collective. extra: must be empty, see check.py."""
        state = self._optimizer.state
        shards, owned = self._weight_shards(extra), self._owned()
        moments: dict[str, Shard] = {}
        for each in owned:
            for key, value in state.get(each.flat, {}).items():
                if key != _STEP:
                    moments[f"{key}/{each.name}"] = _shard(each, each.in_flat(value))
        steps = self._step_counts()
        if self._world.rank == 0:
            moments |= {f"{_STEP}/{name}": FlatShard(step.view(1), (), 0) for name, step in steps.items()}
        shards[OPTIMIZER] = moments
        values = None
        if self._world.rank == 0:
            groups = [{"names": list(group), "shapes": list(group.values())} for group in self._groups()]
            values = {"type": _TYPE, "groups": groups, "values": {name: {} for name in steps}}
            values = with_loss_scale(values, self._loss_scale)
        return write_policy(shards, values, self._world, copies)

    def weight_files(self, extra: Mapping[str, Mapping[str, Tensor]]) -> Write:
        """Capture the weights alone, without copies; collective. extra: must be empty, see check.py."""
        return write_policy(self._weight_shards(extra), None, self._world, None)

    def _owned(self) -> list[Partition]:
        """The partitions that this process writes; without stages, all processes have the same ones."""
        return self._partitions if self._stage > 0 or self._world.rank == 0 else []

    def _weight_shards(self, extra: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Shard]]:
        if extra:
            raise ValueError(f"DeepSpeed cannot save the tensors {', '.join(extra)}")
        return {STEM: {each.name: _shard(each, each.weight) for each in self._owned()}}

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Restore a checkpoint bitwise, for any processes that wrote it; collective."""
        specs = {name: (shape, torch.float32) for name, shape in self._shapes.items()}
        hint = "resume with the same pretrain, master_dtype and lora settings"
        with ShardedReader(directory, STEM) as reader:
            check_specs(directory, reader.specs(), specs, hint=hint, other_rank_names=())
            values = load_json(directory / f"{OPTIMIZER}.json")
            check_groups(values, _TYPE, self._groups(), ())
            self._load_weights(reader)
        with ShardedReader(directory, OPTIMIZER) as stored:
            self._load_moments(stored, directory)
        load_loss_scale(values, self._loss_scale)

    def _groups(self) -> list[dict[str, list[int]]]:
        """Shapes by name in each parameter group: matrices, which are decayed, and the others."""
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        return [
            {name: shape for name, shape in shapes.items() if len(shape) >= 2},
            {name: shape for name, shape in shapes.items() if len(shape) < 2},
        ]

    def _step_counts(self) -> dict[str, Tensor]:
        """The number of updates of each parameter; empty before the first one."""
        state = self._optimizer.state
        found = {each.name: state[each.flat][_STEP] for each in self._partitions if state.get(each.flat)}
        if not found:
            return {}
        # rank 0 may have no elements of a parameter, and every parameter has the same count
        count = next(iter(found.values()))
        return {name: found.get(name, count) for name in self._shapes}

    def _load_weights(self, reader: ShardedReader) -> None:
        zero = self._engine.optimizer
        if self._stage < 3:  # every rank has whole parameters beside its partition
            for name, parameter in self._parameters.items():
                parameter.copy_(reader.read(name))
        else:
            zero.empty_partition_cache()  # parameters that stay gathered are gathered again
            for each in self._partitions:
                partitioned: Any = self._parameters[each.name]
                partitioned.ds_tensor.view(-1)[: each.numel].copy_(
                    reader.read_flat(each.name, each.start, each.start + each.numel)
                )
        if self._stage > 0:
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
        state = self._optimizer.state
        state.clear()
        if not counts:
            return
        (count,) = counts
        keys = sorted({name.partition("/")[0] for name in names} - {_STEP})
        for flat in flat_tensors(self._partitions):
            state[flat] = {_STEP: torch.tensor(count, device=flat.device)}
            state[flat] |= {key: torch.zeros_like(flat, requires_grad=False) for key in keys}
        for each in self._partitions:
            for key in keys:
                values = stored.read_flat(f"{key}/{each.name}", each.start, each.start + each.numel)
                each.in_flat(state[each.flat][key]).copy_(values)


def _shard(partition: Partition, values: Tensor) -> FlatShard:
    return FlatShard(values.detach(), partition.shape, partition.start)
