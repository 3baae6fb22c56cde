"""Bytes that each rank reads while it loads a model, and the shards that it has afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.support.engines.parity import CPU, LAYOUTS
from thresher.distributed.groups import Group
from thresher.distributed.mesh import ParallelDims
from thresher.distributed.tensors import local_slices, to_local
from thresher.engines.native.build import build_infer
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.spec import ModelSpec
from thresher.models.loading import load, load_sharded
from thresher.models.logps import base_model


@dataclass(frozen=True)
class LoadedShards:
    """values: parameters by name, with their slices of the whole tensor."""

    bytes_read: int
    values: dict[str, tuple[tuple[slice, ...], Tensor]]


def load_and_count(sizes: ParallelDims, path: str) -> LoadedShards:
    settings = FSDP2Settings(tp_size=sizes.tp, pp_size=sizes.pp, cp_size=sizes.cp, dp_replicate=sizes.dp_replicate)
    spec = ModelSpec(
        path=path,
        find_layout=lambda: LAYOUTS["shared"],
        device=CPU,
        world=Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD),
        settings=settings,
    )
    with _counted_reads() as read:
        model = base_model(build_infer(spec).model)
    shards = {name: (local_slices(each), to_local(each).detach()) for name, each in model.named_parameters()}
    return LoadedShards(sum(read), shards)


def error_of_a_load(sizes: ParallelDims, path: str) -> str:
    try:
        load_and_count(sizes, path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def _counted_reads() -> Iterator[list[int]]:
    """Count the bytes of slices that are copied from files, and of whole models that transformers loads."""
    read: list[int] = []
    copy_shard, from_pretrained = load_sharded.copy_shard, load.AutoModelForCausalLM.from_pretrained

    def counting_copy(source: Any, into: Tensor, path: str, name: str) -> None:
        read.append(to_local(into).nbytes)
        copy_shard(source, into, path, name)

    def counting_load(*arguments: Any, **settings: Any) -> Any:
        loaded = from_pretrained(*arguments, **settings)
        read.append(sum(parameter.nbytes for parameter in loaded[0].parameters()))
        return loaded

    load_sharded.copy_shard, load.AutoModelForCausalLM.from_pretrained = counting_copy, counting_load
    try:
        yield read
    finally:
        load_sharded.copy_shard, load.AutoModelForCausalLM.from_pretrained = copy_shard, from_pretrained
