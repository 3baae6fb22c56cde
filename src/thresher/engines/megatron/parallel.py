"""Megatron-Core's process groups, created from the default process group, and our view of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.groups import DataParallelGroup, Group, share_group
from thresher.engines.megatron.declaration import MegatronSizes


@dataclass(frozen=True)
class MegatronGroups:
    """The groups of this process; ranks are ordered tp, cp, dp, pp from the innermost."""

    sizes: MegatronSizes
    tp: Group
    pp: Group
    ep: Group
    dp: DataParallelGroup
    context_parallel: ContextParallel | None

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank == self.pp.size - 1


_created: dict[MegatronSizes, MegatronGroups] = {}


def create_groups(sizes: MegatronSizes) -> MegatronGroups:
    """Create Megatron-Core's groups; a collective call. Models with the same sizes share them."""
    if sizes in _created and parallel_state.model_parallel_is_initialized():
        return _created[sizes]
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError(f"Megatron-Core has groups for sizes other than {sizes} in this process")
    with _shared_groups():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            virtual_pipeline_model_parallel_size=sizes.virtual_pp if sizes.virtual_pp > 1 else None,
            context_parallel_size=sizes.cp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=1,
            order="tp-cp-ep-dp-pp",
            # the default group has a backend for host memory besides the one for the GPU
            create_gloo_process_groups=False,
        )
    model_parallel_cuda_manual_seed(0)  # for dropout, which no model here has
    tp = _group(parallel_state.get_tensor_model_parallel_group())
    pp = _group(parallel_state.get_pipeline_model_parallel_group())
    cp = _group(parallel_state.get_context_parallel_group())
    data = _group(parallel_state.get_data_parallel_group())
    dp = DataParallelGroup(
        data.rank,
        data.size,
        data.group,
        metrics_ranks=_metrics_group(sizes.tp * sizes.cp),
        all_ranks=Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD),
        needs_lockstep=sizes.ep > 1,
        reduces_gradients=False,
        is_writer=tp.rank == pp.rank == cp.rank == 0,
        adds_metrics=tp.rank == cp.rank == 0,
    )
    context_parallel = None
    if cp.size > 1:
        assert cp.group is not None  # noqa: S101
        context_parallel = ContextParallel(cp.rank, cp.size, cp.group)
    _created[sizes] = MegatronGroups(
        sizes, tp, pp, _group(parallel_state.get_expert_model_parallel_group()), dp, context_parallel
    )
    return _created[sizes]


def destroy_groups() -> None:
    """Destroy Megatron-Core's groups, so that others can be created."""
    parallel_state.destroy_model_parallel()
    _created.clear()


def _metrics_group(num_inner: int) -> Group:
    """All data-parallel ranks of all stages that have this process's tp and cp index."""
    by_index = [list(range(inner, dist.get_world_size(), num_inner)) for inner in range(num_inner)]
    own = share_group(by_index, "metrics")
    assert own is not None  # noqa: S101
    return _group(own)


@contextmanager
def _shared_groups() -> Iterator[None]:
    """Let Megatron-Core share groups with the same ranks within a `with` block.

    It asks every process for the groups of all, one by one and for each of 20 kinds: 5,493 times at 1,024 processes.
    `ProcessGroupCollection` would pass groups to its model and optimizer, but not to all that these call.
    """
    by_distances: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def create_group(ranks: Sequence[int], *, group_desc: str = "", **_options: Any) -> Any:
        ranks = sorted(ranks)
        distances = tuple(rank - ranks[0] for rank in ranks)
        if distances not in by_distances:
            by_distances[distances] = share_group(_translations(distances), group_desc)
        return by_distances[distances] if dist.get_rank() in ranks else dist.GroupMember.NON_GROUP_MEMBER

    megatrons, parallel_state.create_group = parallel_state.create_group, create_group
    try:
        yield
    finally:
        parallel_state.create_group = megatrons


def _translations(distances: Sequence[int]) -> list[list[int]]:
    """All groups of a kind, by the distances between the ranks of one: they do not overlap."""
    found: list[list[int]] = []
    covered: set[int] = set()
    for lowest in range(dist.get_world_size() - distances[-1]):
        ranks = [lowest + each for each in distances]
        if covered.isdisjoint(ranks):
            found.append(ranks)
            covered.update(ranks)
    return found


def _group(group: dist.ProcessGroup) -> Group:
    return Group(group.rank(), group.size(), group)
