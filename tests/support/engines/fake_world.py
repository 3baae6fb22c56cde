"""Megatron-Core models of many ranks in one process, on the meta device and with process groups that do nothing."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from math import prod
from typing import Any

from thresher.engines.megatron.declaration import MegatronSizes

Elements = dict[str, tuple[tuple[int, ...], int]]


def shapes_in_a_fake_world(
    model_type: str, config: dict[str, Any], sizes: MegatronSizes, num_processes: int
) -> tuple[Elements, Elements]:
    """Build the model of each rank.

    Returns, by name of transformers' tensors, their shape and the number of elements that the ranks hold, without
    replicas; and the same of the transformers model.
    """
    context = multiprocessing.get_context("forkserver")
    with context.Pool(1) as pool:  # a process has one default group
        return pool.apply(_shapes, (model_type, config, sizes, num_processes))


def megatron_groups_in_a_fake_world(
    sizes: MegatronSizes, num_processes: int, rank: int
) -> tuple[dict[str, list[int]], dict[str, list[int]], list[list[int]]]:
    """Create Megatron-Core's groups of a rank: as it does alone, and as thresher lets it.

    Returns the ranks of its groups by name, of both, and the ranks of every group that the second one creates.
    """
    context = multiprocessing.get_context("forkserver")
    with context.Pool(1) as pool:
        return pool.apply(_groups, (sizes, num_processes, rank))


def _groups(
    sizes: MegatronSizes, num_processes: int, rank: int
) -> tuple[dict[str, list[int]], dict[str, list[int]], list[list[int]]]:
    import contextlib
    from unittest import mock

    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.support.megatron_cpu import use_cpu_as_cuda

    use_cpu_as_cuda()
    from megatron.core import parallel_state

    from thresher.engines.megatron import parallel

    found: list[dict[str, list[int]]] = []
    created: list[list[int]] = []
    for is_shared in (False, True):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_processes)
        alone = mock.patch.object(parallel, "_shared_groups", contextlib.nullcontext)
        with contextlib.nullcontext() if is_shared else alone:
            parallel.create_groups(sizes)
        groups = {name: each for name, each in vars(parallel_state).items() if isinstance(each, dist.ProcessGroup)}
        found.append({name: dist.get_process_group_ranks(each) for name, each in groups.items()})
        created = [list(ranks) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()]
        parallel.destroy_groups()
        dist.destroy_process_group()
    return found[0], found[1], created


def _shapes(
    model_type: str, config: dict[str, Any], sizes: MegatronSizes, num_processes: int
) -> tuple[Elements, Elements]:
    import torch
    import torch.distributed as dist
    from accelerate import init_empty_weights
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.megatron_cpu import use_cpu_as_cuda

    use_cpu_as_cuda()
    from tests.support.engines.megatron_models import settings_of
    from thresher.engines.megatron.build import build_chunks
    from thresher.engines.megatron.parallel import destroy_groups

    hf_config = AutoConfig.for_model(model_type, **config)
    settings, meta = settings_of(sizes), torch.device("meta")
    found: dict[tuple[str, tuple[int, ...]], set[tuple[tuple[int, int], ...]]] = {}
    for rank in range(num_processes):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_processes)
        for chunk in build_chunks(hf_config, "fake", settings, "off", torch.bfloat16, meta):
            for name, parameter in chunk.named_parameters():
                for piece in chunk.weight_map.pieces(name, parameter.detach()):
                    assert piece.values().shape == piece.shape
                    slices = tuple((each.start, each.stop) for each in piece.slices)
                    found.setdefault((piece.hf_name, piece.hf_shape), set()).add(slices)
        destroy_groups()
        dist.destroy_process_group()
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(hf_config)
    counted: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for key, pieces in found.items():
        counted[key] = sum(prod(stop - start for start, stop in slices) for slices in pieces)
    return (
        {name: (shape, count) for (name, shape), count in counted.items()},
        {name: (tuple(parameter.shape), parameter.numel()) for name, parameter in model.named_parameters()},
    )
