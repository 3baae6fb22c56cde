"""Build the engines of the DeepSpeed strategies."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from thresher.models.loading.adapters import attach_adapter
from thresher.models.logps import base_model
from thresher.models.optimizations.recompute import recompute_activations
from thresher.strategies.deepspeed.config import engine_config
from thresher.strategies.deepspeed.infer import DeepSpeedInfer
from thresher.strategies.deepspeed.loading import gather_experts_together, load_model, partitioner
from thresher.strategies.deepspeed.optimizer import partitioned_adamw
from thresher.strategies.deepspeed.process import data_parallel_group, import_deepspeed
from thresher.strategies.deepspeed.train import DeepSpeedTrain
from thresher.strategies.native.build import build_replica
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.optimizer import parameter_groups
from thresher.strategies.spec import ModelSpec, PolicySpec, seed_dropout


def build_train(spec: PolicySpec) -> DeepSpeedTrain:
    """Load the policy, attach adapters if it has any, and partition it with its optimizer."""
    deepspeed = import_deepspeed(spec.device)
    stage, options = spec.settings.stage, spec.settings.zero_options
    partition = partitioner(deepspeed, engine_config(stage, options)) if stage == 3 else None
    model = load_model(
        spec.source, spec.trained.apply, lambda model: spec.trained.init(model, spec.seed), spec.device, partition
    )
    if stage == 3:
        gather_experts_together(deepspeed, model)
    recompute_activations(base_model(model.causal_lm), spec.gradient_checkpointing, offload=spec.offloads_activations)
    seed_dropout(spec.seed, spec.world.rank)
    # a partitioned parameter has lost its shape
    num_dims = {parameter: len(model.shapes[name]) for name, parameter in model.trained.items()}
    groups = parameter_groups(num_dims, spec.optimizer.weight_decay, num_dims.__getitem__)
    optimizer = partitioned_adamw(groups, spec.optimizer)
    engine, *_ = deepspeed.initialize(
        model=base_model(model.causal_lm),
        optimizer=optimizer,
        config=engine_config(stage, options, num_trained=model.counts.trained),
        dist_init_required=False,
    )
    dp_group = data_parallel_group(spec.world)
    return DeepSpeedTrain(
        model,
        engine,
        optimizer,
        stage,
        spec.layout,
        spec.compute_dtype,
        spec.optimizer,
        dp_group,
        router_loss_coef=spec.router_loss_coef,
    )


def build_infer(spec: ModelSpec) -> DeepSpeedInfer | NativeInfer:
    """Load a frozen model: partitioned at stage 3, otherwise a full copy per process."""
    if spec.settings.stage < 3:
        return build_replica(spec)
    deepspeed = import_deepspeed(spec.device)
    config = engine_config(3, spec.settings.zero_options)
    adapter = spec.adapter

    def prepare(model: PreTrainedModel) -> nn.Module:
        return (model if adapter is None else attach_adapter(model, adapter)).requires_grad_(False)

    def init_adapters(model: PreTrainedModel) -> None:
        if adapter is not None:
            adapter.load(model)

    model = load_model(spec.source, prepare, init_adapters, spec.device, partitioner(deepspeed, config))
    gather_experts_together(deepspeed, model)
    model.causal_lm.eval()
    engine, *_ = deepspeed.initialize(model=base_model(model.causal_lm), config=config, dist_init_required=False)
    return DeepSpeedInfer(model, engine, spec.layout, spec.compute_dtype, data_parallel_group(spec.world))
