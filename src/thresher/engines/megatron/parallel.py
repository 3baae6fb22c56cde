"""Megatron-Core's process groups, created from the default process group, and our view of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from thresher.distributed.context_parallel import ContextParallel
from thresher.distributed.groups import DataParallelGroup, Group
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
    own, _ = dist.new_subgroups_by_enumeration(by_index)
    assert own is not None  # noqa: S101
    return _group(own)


def _group(group: dist.ProcessGroup) -> Group:
    return Group(group.rank(), group.size(), group)
