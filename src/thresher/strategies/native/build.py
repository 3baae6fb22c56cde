"""Build the models of the native strategies: a full copy per process, or the shards of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from thresher.distributed.groups import DataParallelGroup
from thresher.distributed.mesh import Mesh, ParallelDims
from thresher.models.loading.adapters import attach_adapter
from thresher.models.loading.load_sharded import load_local_shards
from thresher.models.logps import base_model
from thresher.models.optimizations.recompute import recompute_activations
from thresher.strategies.native.declaration import FSDP2Settings
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.parallelize import ParallelContext, parallelize
from thresher.strategies.native.pipeline_parallel import PipelineSettings
from thresher.strategies.native.train import NativeTrain
from thresher.strategies.spec import ModelSpec, PolicySpec, seed_dropout
from thresher.strategies.strategy import ParameterCounts


def build_train(spec: PolicySpec) -> NativeTrain:
    """Load the policy, attach adapters if it has any, and build its optimizer."""
    lora = spec.trained.lora
    model, module, parallel, counts = _load_and_parallelize(
        spec,
        lambda model: spec.trained.apply(model, frozen_dtype=spec.compute_dtype),
        needs_weights=lora is not None and lora.starts_from_weights,
    )
    spec.trained.init(model, spec.seed)
    recompute_activations(base_model(module), spec.gradient_checkpointing, offload=spec.offloads_activations)
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
    if spec.compilation is not None:
        policy.compile(spec.compilation)
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
    if spec.compilation is not None:
        scorer.compile(spec.compilation)
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
    spec: ModelSpec, prepare: Callable[[PreTrainedModel], nn.Module], *, needs_weights: bool = False
) -> tuple[PreTrainedModel, nn.Module, ParallelContext, ParameterCounts]:
    """Load a full copy of a model, or this process's shards of it; the counts are those of the whole model.

    prepare: adds adapters, which have no values yet; needs_weights: it reads those of the model.
    """
    source, settings, world = spec.source, spec.settings, spec.world
    if settings.is_replicated(world.size):
        return _load_replica(spec, prepare, needs_weights=needs_weights)
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
        reduce_dtype=_unless_stored(settings.reduce_dtype),
        pipeline=PipelineSettings(settings.pp_schedule, _unless_stored(settings.pp_dtype)),
    )
    return model, module, parallel, counts


def _unless_stored(dtype: str) -> torch.dtype | None:
    """A precision other than that of the weights, or None."""
    return torch.bfloat16 if dtype == "bf16" else None


def _load_replica(
    spec: ModelSpec, prepare: Callable[[PreTrainedModel], nn.Module], *, needs_weights: bool
) -> tuple[PreTrainedModel, nn.Module, ParallelContext, ParameterCounts]:
    """Load a full copy of a model; replicas with a process group read its files together, if they can."""
    source, world = spec.source, spec.world
    parallel = ParallelContext(dp_group=DataParallelGroup(world.rank, world.size, world.group))
    can_share = world.size > 1 and world.group is not None and not needs_weights
    shared = source.empty_to_share() if can_share else None
    model = source.load() if shared is None else shared
    module = prepare(model)
    counts = ParameterCounts.of(module)
    if shared is None:
        module = source.move(module, spec.device)
    else:
        load_local_shards(model, source.named_path, spec.device, replicas=world)
    return model, module, parallel, counts
