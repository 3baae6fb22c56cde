"""Build the models of the native strategies: a full copy per process, or the shards of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn
from transformers import PreTrainedModel

from thresher.distributed.groups import DataParallelGroup
from thresher.distributed.mesh import Mesh, ParallelDims
from thresher.models.loading.lora import attach_adapter
from thresher.models.logps import base_model
from thresher.strategies.native.declaration import FSDP2Settings
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.parallelize import ParallelContext, parallelize
from thresher.strategies.native.train import NativeTrain
from thresher.strategies.spec import ModelSpec, PolicySpec, seed_dropout
from thresher.strategies.strategy import ParameterCounts


def build_train(spec: PolicySpec) -> NativeTrain:
    """Load the policy, attach adapters if it has any, and build its optimizer."""
    model, module, parallel, counts = _load_and_parallelize(spec, spec.trained.apply)
    spec.trained.init(model, spec.seed)
    if spec.gradient_checkpointing:
        base_model(module).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # equally on all tp ranks
    seed_dropout(spec.seed, parallel.dp_group.rank, parallel.cp_rank)
    policy = NativeTrain(
        module,
        spec.layout,
        spec.compute_dtype,
        spec.optimizer,
        parallel,
        counts,
        router_loss_coef=spec.router_loss_coef,
    )
    if spec.compiles:
        policy.compile()
    return policy


def build_infer(spec: ModelSpec) -> NativeInfer:
    """Load a frozen model, sharded along the axes of the settings."""
    adapter = spec.adapter
    model, module, parallel, _ = _load_and_parallelize(
        spec, lambda model: model if adapter is None else attach_adapter(model, adapter)
    )
    if adapter is not None:
        adapter.load(model)
    module.requires_grad_(False)
    scorer = NativeInfer(module.eval(), spec.layout, spec.compute_dtype, parallel)
    if spec.compiles:
        scorer.compile()  # compiled layers round differently
    return scorer


def build_replica(spec: ModelSpec) -> NativeInfer:
    """Load a full copy of a frozen model on every process."""
    return build_infer(replace(spec, settings=FSDP2Settings(dp_replicate=spec.world.size)))


def axis_sizes(settings: FSDP2Settings, num_processes: int) -> ParallelDims:
    """Processes along each axis; the remaining ones go to dp_shard."""
    return ParallelDims(
        pp=settings.pp_size,
        dp_replicate=settings.dp_replicate,
        dp_shard=settings.num_shards(num_processes),
        cp=settings.cp_size,
        tp=settings.tp_size,
    )


def _load_and_parallelize(
    spec: ModelSpec, prepare: Callable[[PreTrainedModel], nn.Module]
) -> tuple[PreTrainedModel, nn.Module, ParallelContext, ParameterCounts]:
    """Load a full copy of a model, or this process's shards of it; the counts are those of the whole model.

    prepare: adds adapters, which have no values yet.
    """
    source, settings, world = spec.source, spec.settings, spec.world
    if settings.is_replicated(world.size):
        model = source.load()
        module = prepare(model)
        counts = ParameterCounts.of(module)
        parallel = ParallelContext(dp_group=DataParallelGroup(world.rank, world.size, world.group))
        return model, source.move(module, spec.device), parallel, counts
    model = source.empty()
    module = prepare(model)
    counts = ParameterCounts.of(module)
    parallel = parallelize(
        model,
        source.shards_path,
        Mesh.create(axis_sizes(settings, world.size), spec.device),
        spec.compute_dtype,
        spec.device,
        offload=settings.cpu_offload,
        zero_stage=settings.zero_stage,
        virtual_pp_size=settings.virtual_pp_size,
        sequence_parallel=settings.sequence_parallel,
    )
    return model, module, parallel, counts
