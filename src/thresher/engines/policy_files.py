"""Checkpoint files of a policy: every engine decides which shards a process writes, and the files are the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from thresher.checkpoint.background import HostBuffers
from thresher.checkpoint.json_io import save_json
from thresher.checkpoint.save import Write
from thresher.checkpoint.tensor_files import Shard, save_shards
from thresher.checkpoint.tensor_index import ShardFile
from thresher.distributed.groups import Group

OPTIMIZER = "optimizer"
# the class of the optimizer state, however an engine partitions it
ADAMW = "AdamW"
LOSS_SCALE = "loss_scale"  # a key of optimizer.json, in fp16 only
RESUME_HINT = "resume with the same pretrain, master_dtype and lora settings"


def write_policy(
    # those that this process writes, by stem and name; with copies, training may change them meanwhile, after
    # `HostBuffers.hold_changes`
    shards: Mapping[str, Mapping[str, Shard]],
    # the optimizer state that is not tensors, on the one process that writes it
    values: Mapping[str, Any] | None,
    world: Group,
    copies: HostBuffers | None,
) -> Write:
    """Return a function that writes this process's files; collective."""
    if copies is not None:
        buffers = copies.copy(
            {f"{stem}/{name}": each.values for stem, local in shards.items() for name, each in local.items()}
        )
        shards = {
            stem: {name: replace(shard, values=buffers[f"{stem}/{name}"]) for name, shard in local.items()}
            for stem, local in shards.items()
        }
    has_shards = any(shards.values())
    # files are numbered among the processes that write shards; replicas write none
    writers = [rank for rank, writes in enumerate(world.all_gather_object(has_shards)) if writes]

    def write(directory: Path) -> list[str]:
        names = []
        if copies is not None:
            copies.wait()
        if has_shards:
            number = ShardFile(writers.index(world.rank), len(writers))
            names += [save_shards(directory, stem, local, number) for stem, local in shards.items()]
        if values is not None:
            save_json(directory / f"{OPTIMIZER}.json", values)
            names.append(f"{OPTIMIZER}.json")
        return names

    return write


def adamw_groups(shapes: Mapping[str, list[int]]) -> list[dict[str, list[int]]]:
    """Shapes by name in each parameter group: matrices, which are decayed, and all others."""
    return [
        {name: shape for name, shape in shapes.items() if len(shape) >= 2},
        {name: shape for name, shape in shapes.items() if len(shape) < 2},
    ]


def adamw_values(shapes: Mapping[str, list[int]], updated: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer state that is not tensors; updated: the parameters that have moments."""
    groups = [{"names": list(group), "shapes": list(group.values())} for group in adamw_groups(shapes)]
    return {"type": ADAMW, "groups": groups, "values": {name: {} for name in updated}}
