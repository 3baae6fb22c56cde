"""The policy's part of a checkpoint: every process writes the parts that no other does, and reads those it needs.

The files do not say how many processes there were, or along which axes: a part knows where in its whole it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from thresher.checkpoint.collective_save import Write
from thresher.checkpoint.json_io import load_json, save_json
from thresher.checkpoint.optimizer import join_values, load_optimizer_state, optimizer_state
from thresher.checkpoint.safetensors_io import save_shards
from thresher.checkpoint.sharded import HostBuffers, ShardFile, TensorShard, shards_to_write
from thresher.checkpoint.sharded_reader import LocalShards, Shape, ShardedReader, Slices
from thresher.checkpoint.state import State
from thresher.checkpoint.weights import STEM, load_weights
from thresher.distributed.sharded_tensor import local_slices
from thresher.strategies.native.parallelize import ParallelContext
from thresher.strategies.native.parameters import LocalParameters

_OPTIMIZER = "optimizer"


class PolicyCheckpoint:
    """Weights and optimizer state to and from the files of a checkpoint."""

    def __init__(self, parameters: LocalParameters, optimizer: torch.optim.Optimizer, placement: ParallelContext):
        self._parameters = parameters
        self._optimizer = optimizer
        self._placement = placement

    def snapshot(self, extra: Mapping[str, Mapping[str, Tensor]], copies: HostBuffers | None) -> Write:
        """Take everything as it is now; all processes take part."""
        wholes, world = self._parameters.by_name, self._placement.dp_group.world
        state = optimizer_state(self._optimizer, self._parameters.shard_names, wholes)
        moments = {name: _split_like(tensor, wholes[_parameter_of(name)]) for name, tensor in state.tensors.items()}
        parts = {stem: self._parts(tensors, tensors) for stem, tensors in {STEM: wholes, **extra}.items()}
        parts[_OPTIMIZER] = self._parts(state.tensors, moments)
        if copies is not None:
            parts = {stem: _copied(stem, own, copies) for stem, own in parts.items()}
        # of all processes that have the same parameters, one tells what there is to tell of them
        told = world.gather_object(state.values if self._parameters.owns(torch.zeros(())) else None)
        values = None if told is None else join_values([each for each in told if each is not None])
        number = self._file_number(has_something=any(parts.values()))

        def write(directory: Path) -> list[str]:
            names = []
            if number is not None:
                names += [save_shards(directory, stem, own, number) for stem, own in parts.items()]
            if values is not None:
                save_json(directory / f"{_OPTIMIZER}.json", values)
                names.append(f"{_OPTIMIZER}.json")
            return names

        return write

    def load(self, directory: Path) -> None:
        """Restore what any processes wrote, bitwise; all processes take part."""
        wholes = self._parameters.by_name
        elsewhere = self._placement.dp_group.world.names_on_other_ranks(wholes)
        mend = "resume with the same pretrain, master_dtype and lora settings"
        load_weights(directory, wholes, hint=mend, other_rank_names=elsewhere)

        def box_of(name: str, shape: Shape) -> Slices:
            return local_slices(wholes[_parameter_of(name)]) if shape else ()

        values = load_json(directory / f"{_OPTIMIZER}.json")
        with ShardedReader(directory, _OPTIMIZER) as stored:
            state = State(LocalShards(stored, box_of), values)
            load_optimizer_state(self._optimizer, self._parameters.shard_names, state, wholes, elsewhere)

    def _parts(self, tensors: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> dict[str, TensorShard]:
        return shards_to_write(tensors, places, self._parameters.owns)

    def _file_number(self, *, has_something: bool) -> ShardFile | None:
        """Number the files among the processes that have something to write: copies of a whole write nothing."""
        world = self._placement.dp_group.world
        writers = [rank for rank, writes in enumerate(world.all_gather_object(has_something)) if writes]
        return ShardFile(writers.index(world.rank), len(writers)) if has_something else None


def _parameter_of(name: str) -> str:
    return name.partition("/")[2]


def _split_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Moments are split as their parameter is; a count of steps is whole everywhere."""
    return parameter if tensor.ndim else tensor


def _copied(stem: str, parts: Mapping[str, TensorShard], copies: HostBuffers) -> dict[str, TensorShard]:
    return {name: replace(part, values=copies.take(f"{stem}/{name}", part.values)) for name, part in parts.items()}
