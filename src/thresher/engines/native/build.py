"""Build the native engine: plain torch on one device per process, with a full copy of the model or its shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from thresher.config.roles import ModelArgs, TrainingArgs
from thresher.distributed.groups import DataParallelGroup
from thresher.distributed.mesh import Mesh, ParallelDims
from thresher.distributed.replicas import ReplicaSums
from thresher.engines.accumulate import MicroBatchExecutor
from thresher.engines.engine import Engine, TrainEngine
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.fsdp import GradientSync
from thresher.engines.native.parallelize import ParallelContext, parallelize
from thresher.engines.native.parameters import LocalCheckpoint, LocalParameters
from thresher.engines.native.sequential import SequentialExecutor, with_balance
from thresher.engines.nonfinite import LossScale
from thresher.engines.spec import ModelSpec, seed_dropout
from thresher.models.layouts import Layout
from thresher.models.loading.adapters import adapter_disabled, attach_adapter
from thresher.models.loading.load_sharded import load_local_shards
from thresher.models.logps import PairModel, base_model
from thresher.models.optimizations.compile import Compilation
from thresher.models.optimizations.recompute import recompute_activations


def build_train(spec: ModelSpec[FSDP2Settings]) -> TrainEngine:
    """Load the policy, attach adapters if it has any, and build its optimizer."""
    lora, training = spec.trained.lora, spec.training
    model, module, parallel = _load_and_parallelize(
        spec,
        lambda model: spec.trained.apply(model, frozen_dtype=spec.compute_dtype),
        needs_weights=lora is not None and lora.starts_from_weights,
    )
    spec.trained.init(model, spec.seed)
    recompute_activations(base_model(module), training.gradient_checkpointing, offload=training.activation_offload)
    cp = parallel.context_parallel
    # equally on all tp ranks
    seed_dropout(spec.seed, parallel.dp_group.rank, 0 if cp is None else cp.rank)
    return train_engine(
        module,
        spec.layout,
        spec.compute_dtype,
        training,
        parallel,
        model_args=spec.model_args,
        compilation=spec.compilation,
    )


def build_infer(spec: ModelSpec[FSDP2Settings]) -> Engine:
    """Load a frozen model, sharded along the mesh dimensions of the settings."""
    adapter = spec.adapter
    model, module, parallel = _load_and_parallelize(
        spec, lambda model: model if adapter is None else attach_adapter(model, adapter)
    )
    if adapter is not None:
        adapter.load(model)
    module.requires_grad_(False)
    return infer_engine(module.eval(), spec.layout, spec.compute_dtype, parallel, compilation=spec.compilation)


def build_replica(spec: ModelSpec[Any]) -> Engine:
    """Load a full copy of a frozen model on every process."""
    return build_infer(replace(spec, settings=FSDP2Settings(dp_replicate=spec.world.size)))


def train_engine(
    module: nn.Module,
    layout: Layout,
    compute_dtype: torch.dtype,
    training: TrainingArgs,
    parallel: ParallelContext = ParallelContext(),  # noqa: B008  # frozen
    *,
    model_args: ModelArgs = ModelArgs(),  # noqa: B008  # frozen
    compilation: Compilation | None = None,
) -> TrainEngine:
    """The engine of a policy that is loaded."""
    model = with_balance(_pair_model(module, layout, compute_dtype, parallel), model_args, parallel.dp_group)
    parameters = LocalParameters(module, model.base_model, parallel, training, model_args)
    if compilation is not None:
        compilation.apply(model.backbone)
    return TrainEngine(
        model=module.train(),
        executor=_executor(model, layout, parallel, parallel.gradient_sync or parameters.replicas),
        dp_group=parallel.dp_group,
        device=model.device,
        hidden_size=model.hidden_size,
        parameters=parameters,
        checkpoint=LocalCheckpoint(parameters),
        training=training,
        adapter_disabled=partial(adapter_disabled, module),
        scaler=LossScale.of(training, compute_dtype),
        within_step=parameters.within_step,
    )


def infer_engine(
    module: nn.Module,
    layout: Layout,
    compute_dtype: torch.dtype,
    parallel: ParallelContext = ParallelContext(),  # noqa: B008  # frozen
    *,
    compilation: Compilation | None = None,
) -> Engine:
    """The engine of a frozen model that is loaded."""
    model = _pair_model(module, layout, compute_dtype, parallel)
    if compilation is not None:
        compilation.apply(model.backbone)
    return Engine(
        module,
        _executor(model, layout, parallel, parallel.gradient_sync),
        parallel.dp_group,
        model.device,
        model.hidden_size,
    )


def axis_sizes(settings: FSDP2Settings, num_processes: int) -> ParallelDims:
    """Processes along each mesh dimension; the remaining ones go to dp_shard."""
    return ParallelDims(
        pp=settings.pp_size,
        dp_replicate=settings.dp_replicate,
        dp_shard=settings.num_shards(num_processes),
        cp=settings.cp_size,
        tp=settings.tp_size,
        ep=settings.ep_size,
    )


def _load_and_parallelize(
    spec: ModelSpec[FSDP2Settings],
    prepare: Callable[[PreTrainedModel], nn.Module],  # adds adapters, which have no values yet
    *,
    needs_weights: bool = False,  # prepare reads the values of the model
) -> tuple[PreTrainedModel, nn.Module, ParallelContext]:
    """Load a full copy of a model, or this process's shards of it."""
    settings, world = spec.settings, spec.world
    if not settings.is_replicated(world.size):
        model = spec.empty()
        module = prepare(model)
        mesh = Mesh.create(axis_sizes(settings, world.size), spec.device)
        parallel = parallelize(model, spec.shards_path, mesh, settings, spec.compute_dtype, spec.device, spec.merged)
        return model, module, parallel
    parallel = ParallelContext(dp_group=DataParallelGroup(world.rank, world.size, world.group))
    # replicas with a process group read the files together, if they can; a quantized model can only be read so
    can_share = spec.is_quantized or (world.size > 1 and world.group is not None and not needs_weights)
    shared = spec.empty_to_share() if can_share else None
    model = spec.load() if shared is None else shared
    module = prepare(model)
    if shared is None:
        module = spec.move(module)
    else:
        load_local_shards(model, spec.path, spec.device, replicas=world, merged=spec.merged)
    return model, module, parallel


def _pair_model(module: nn.Module, layout: Layout, compute_dtype: torch.dtype, parallel: ParallelContext) -> PairModel:
    return PairModel.for_layout(
        module,
        compute_dtype,
        layout,
        parallel.context_parallel,
        # FSDP2 gathers the weight of the head around its forward, on the stage that has it
        calls_head=parallel.gradient_sync is not None and (parallel.stage is None or parallel.stage.is_last),
        device=parallel.device,
        # processes of tp that split the rows outside of its matrices
        num_row_shards=parallel.tp.size if parallel.settings.sequence_parallel else 1,
    )


def _executor(
    model: PairModel, layout: Layout, parallel: ParallelContext, sync: GradientSync | ReplicaSums | None = None
) -> MicroBatchExecutor:
    if parallel.stage is not None:
        from thresher.engines.native.pipeline_executor import PipelineExecutor

        if parallel.settings.pp_schedule == "zero_bubble" and isinstance(sync, ReplicaSums):
            sync = None  # gradients of weights follow a backward, so sums wait for all of them
        return PipelineExecutor(model, layout, parallel.stage, sync, parallel.settings)

    def run_backward(loss: Tensor, is_last: bool) -> None:
        if sync is not None:
            sync.before_backward(is_last=is_last)
        loss.backward()

    return SequentialExecutor(model, layout, run_backward)
