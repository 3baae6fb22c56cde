"""Weights and optimizer state of a checkpoint: each process writes the shards that it owns and reads those it needs.

The files record the slice of each shard, not the mesh, so any number of processes along any axes can load them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.save import Write
from thresher.checkpoint.state import STEM, State, join_values, load_optimizer_state, load_weights, optimizer_state
from thresher.checkpoint.tensor_files import LocalShards, Shape, ShardedReader, Slices, TensorShard, shards_to_write
from thresher.distributed.tensors import local_slices
from thresher.strategies.loss_scale import LossScale
from thresher.strategies.native.parallelize import ParallelContext
from thresher.strategies.native.parameters import LocalParameters
from thresher.strategies.policy_files import OPTIMIZER, load_loss_scale, with_loss_scale, write_policy


class PolicyCheckpoint:
    """Saves and loads the weights, the optimizer state and the loss scale of a policy."""

    def __init__(
        self,
        parameters: LocalParameters,
        optimizer: torch.optim.Optimizer,
        parallel: ParallelContext,
        loss_scale: LossScale | None = None,
    ):
        self._parameters = parameters
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._world = parallel.dp_group.world

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None) -> Write:
        """Capture everything at this step; collective. Changes after it wait for the copies (`hold_changes`)."""
        parameters, owns = self._parameters.by_name, self._parameters.owns
        state = optimizer_state(self._optimizer, self._parameters.shard_names, parameters)
        # moments are sharded like their parameter; a step count is a full scalar on every process
        sharded_like = {name: parameters[_parameter_of(name)] if t.ndim else t for name, t in state.tensors.items()}
        shards = self._weight_shards(extra)
        shards[OPTIMIZER] = shards_to_write(state.tensors, sharded_like, owns)
        # optimizer.json needs the non-tensor state of every pipeline stage once: from the owner of replicated tensors
        is_owner = owns(torch.zeros(()))
        gathered = self._world.gather_object(state.values if is_owner else None)
        values = None if gathered is None else join_values([each for each in gathered if each is not None])
        if values is not None:
            values = with_loss_scale(values, self._loss_scale)
        return write_policy(shards, values, self._world, copies, holds_changes=False)

    def weight_files(self, extra: Mapping[str, Mapping[str, Tensor]]) -> Write:
        """Capture the weights and the extra tensors, without copies; collective."""
        return write_policy(self._weight_shards(extra), None, self._world, None)

    def _weight_shards(self, extra: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, TensorShard]]:
        by_stem = {STEM: self._parameters.by_name, **extra}
        return {stem: shards_to_write(tensors, tensors, self._parameters.owns) for stem, tensors in by_stem.items()}

    def load(self, directory: Path) -> None:
        """Restore a checkpoint bitwise, for any number of processes that wrote it; collective."""
        parameters = self._parameters.by_name
        other_rank_names = self._world.names_on_other_ranks(parameters)
        hint = "resume with the same pretrain, master_dtype and lora settings"
        load_weights(directory, parameters, hint=hint, other_rank_names=other_rank_names)

        def slices_of(name: str, shape: Shape) -> Slices:
            return local_slices(parameters[_parameter_of(name)]) if shape else ()

        values = load_json(directory / f"{OPTIMIZER}.json")
        with ShardedReader(directory, OPTIMIZER) as stored:
            state = State(LocalShards(stored, slices_of), values)
            load_optimizer_state(self._optimizer, self._parameters.shard_names, state, parameters, other_rank_names)
        load_loss_scale(values, self._loss_scale)


def _parameter_of(name: str) -> str:
    return name.partition("/")[2]
