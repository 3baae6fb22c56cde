"""Weights and optimizer state of a Megatron-Core policy in the project's checkpoints, by the names of transformers.

The files are those of the native engine: slices of the tensors of transformers, weights in fp32, and the moments by the
same names. Any engine and any layout can load them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.save import Write
from thresher.checkpoint.state import STEM, check_groups, check_specs, join_values
from thresher.checkpoint.tensor_files import ShardedReader, TensorShard
from thresher.distributed.groups import Group
from thresher.strategies.loss_scale import LossScale
from thresher.strategies.megatron.parameter_state import MOMENTS, STEP, WEIGHT, ParameterState
from thresher.strategies.megatron.weights import Piece
from thresher.strategies.policy_files import OPTIMIZER, load_loss_scale, with_loss_scale, write_policy

_KIND = "AdamW"


@dataclass(frozen=True)
class NamedState:
    """A parameter of this process with the pieces of transformers' tensors that it holds.

    pieces: of a tensor in the shape of the parameter. is_owner: of all processes that hold the same pieces except
    data-parallel ranks, this one writes them.
    """

    state: ParameterState
    pieces: Callable[[Tensor], list[Piece]]
    is_owner: bool

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Full shapes by the names of transformers."""
        return {piece.hf_name: list(piece.hf_shape) for piece in self.pieces(self.state.parameter.detach())}

    def shards(self, key: str) -> dict[str, TensorShard]:
        """The shards of the weight or a moment that this process writes; collective over data-parallel ranks."""
        whole = self.state.gather(key)
        return {} if whole is None or not self.is_owner else {p.hf_name: _shard(p) for p in self.pieces(whole)}

    def load(self, weights: ShardedReader, moments: ShardedReader, with_state: bool) -> None:
        """Read the slices of this process, bitwise."""
        shape, name = self.state.parameter.shape, next(iter(self.shapes), None)
        if name is None:  # only padding of the vocabulary
            return
        num_steps = float(moments.read(f"{STEP}/{name}")) if with_state else None
        read = {key: self._read(moments, f"{key}/", shape) for key in (MOMENTS if with_state else ())}
        self.state.assign(self._read(weights, "", shape), read, num_steps)

    def _read(self, reader: ShardedReader, prefix: str, shape: torch.Size) -> Tensor:
        whole = torch.zeros(shape)
        for piece in self.pieces(whole):
            piece.copy_(reader.read(prefix + piece.hf_name, piece.slices))
        return whole


class MegatronCheckpoint:
    """Saves and loads the weights, the optimizer state and, in fp16, the loss scale of a policy."""

    def __init__(self, states: Sequence[NamedState], world: Group, loss_scale: LossScale | None = None):
        self._states = states
        self._world = world
        self._loss_scale = loss_scale

    def snapshot(self, copies: HostBuffers | None) -> Write:
        """Capture everything at this step; collective."""
        files: dict[str, dict[str, TensorShard]] = {STEM: {}, OPTIMIZER: {}}
        for each in self._states:
            for key in (WEIGHT, *MOMENTS):
                stem, prefix = (STEM, "") if key == WEIGHT else (OPTIMIZER, f"{key}/")
                files[stem] |= {prefix + name: shard for name, shard in each.shards(key).items()}
            if each.is_owner and each.state.is_writer and (num_steps := each.state.num_steps) is not None:
                scalar = TensorShard(torch.tensor(num_steps), (), ())
                files[OPTIMIZER] |= {f"{STEP}/{name}": scalar for name in each.shapes}
        gathered = self._world.gather_object(self._values())
        values = None if gathered is None else with_loss_scale(join_values(gathered), self._loss_scale)
        return write_policy(files, values, self._world, copies)

    def weight_files(self) -> Write:
        """Capture the weights alone, without copies; collective."""
        shards = {name: shard for each in self._states for name, shard in each.shards(WEIGHT).items()}
        return write_policy({STEM: shards}, None, self._world, None)

    def load(self, directory: Path) -> None:
        """Restore a checkpoint bitwise, for any engine and number of processes that wrote it; collective."""
        expected = {name: (tuple(shape), torch.float32) for each in self._states for name, shape in each.shapes.items()}
        others = self._world.names_on_other_ranks(expected)
        hint = "resume with the same pretrain, master_dtype and lora settings"
        saved = load_json(directory / f"{OPTIMIZER}.json")
        with ShardedReader(directory, STEM) as weights, ShardedReader(directory, OPTIMIZER) as moments:
            check_specs(directory, weights.specs(), expected, hint=hint, other_rank_names=others)
            check_groups(saved, _KIND, self._groups(), others)
            for each in self._states:
                with_state = bool(each.shapes.keys() & saved["values"].keys())
                each.load(weights, moments, with_state)
        load_loss_scale(saved, self._loss_scale)

    def _groups(self) -> list[dict[str, list[int]]]:
        """Full shapes by name of the matrices, which are decayed, and of all other parameters."""
        shapes = {name: shape for each in self._states for name, shape in each.shapes.items()}
        return [
            {name: shape for name, shape in shapes.items() if len(shape) >= 2},
            {name: shape for name, shape in shapes.items() if len(shape) < 2},
        ]

    def _values(self) -> dict[str, Any]:
        groups = [{"names": list(group), "shapes": list(group.values())} for group in self._groups()]
        stepped = [each for each in self._states if each.state.num_steps is not None]
        return {"type": _KIND, "groups": groups, "values": {name: {} for each in stepped for name in each.shapes}}


def _shard(piece: Piece) -> TensorShard:
    return TensorShard(piece.values(), piece.hf_shape, tuple(each.start for each in piece.slices))
