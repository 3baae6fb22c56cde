"""Write the shards of a policy: every engine decides which shards a process writes, and the files are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.json_io import save_json
from thresher.checkpoint.save import Write
from thresher.checkpoint.tensor_files import Shard, ShardFile, save_shards
from thresher.distributed.groups import Group
from thresher.strategies.loss_scale import LossScale

OPTIMIZER = "optimizer"
_LOSS_SCALE = "loss_scale"  # a key of optimizer.json, in fp16 only


def write_policy(
    shards: Mapping[str, Mapping[str, Shard]],
    values: Mapping[str, Any] | None,
    world: Group,
    copies: HostBuffers | None,
    *,
    holds_changes: bool = True,
) -> Write:
    """Return a function that writes this process's files; collective.

    shards: those that this process writes, by stem and name; with copies, training may change them meanwhile. values:
    the optimizer state that is not tensors, on the one process that writes it. holds_changes: the GPU finishes the
    copies before any later work; otherwise the caller sees to it before it changes a shard.
    """
    if copies is not None:
        shards = _copied(shards, copies)
        if holds_changes:
            copies.hold_changes()
    number = _file_number(world, has_shards=any(shards.values()))

    def write(directory: Path) -> list[str]:
        names = []
        if copies is not None:
            copies.wait()
        if number is not None:
            names += [save_shards(directory, stem, local, number) for stem, local in shards.items()]
        if values is not None:
            save_json(directory / f"{OPTIMIZER}.json", values)
            names.append(f"{OPTIMIZER}.json")
        return names

    return write


def with_loss_scale(values: Mapping[str, Any], loss_scale: LossScale | None) -> dict[str, Any]:
    """Add the loss scale to the optimizer state that is not tensors."""
    return {**values} if loss_scale is None else {**values, _LOSS_SCALE: loss_scale.state()}


def load_loss_scale(values: Mapping[str, Any], loss_scale: LossScale | None) -> None:
    if loss_scale is not None and _LOSS_SCALE in values:  # a checkpoint of bf16 or fp32 has none
        loss_scale.load(values[_LOSS_SCALE])


def _file_number(world: Group, *, has_shards: bool) -> ShardFile | None:
    """Number the files among the processes that write shards; replicas write none."""
    writers = [rank for rank, writes in enumerate(world.all_gather_object(has_shards)) if writes]
    return ShardFile(writers.index(world.rank), len(writers)) if has_shards else None


def _copied(shards: Mapping[str, Mapping[str, Shard]], copies: HostBuffers) -> dict[str, dict[str, Shard]]:
    buffers = copies.copy(
        {f"{stem}/{name}": each.values for stem, local in shards.items() for name, each in local.items()}
    )
    return {
        stem: {name: replace(shard, values=buffers[f"{stem}/{name}"]) for name, shard in local.items()}
        for stem, local in shards.items()
    }
