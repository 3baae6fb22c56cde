"""The engines: the policy with its optimizer, and the frozen reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel, set_seed

from thresher.builders.axes import axis_sizes, check_axes, check_strategy
from thresher.config import DPOConfig, ModelArgs
from thresher.config.roles import RoleConfig
from thresher.distributed.groups import SINGLE_PROCESS, DataParallelGroup, Group
from thresher.distributed.mesh import Mesh
from thresher.models.layouts import Layout
from thresher.models.layouts.choose import choose_layout
from thresher.models.loading.load import DTYPES, load_model, load_model_config
from thresher.models.loading.load_sharded import build_on_meta
from thresher.models.loading.location import named_model
from thresher.models.loading.lora import attach_lora, init_adapters
from thresher.models.loading.weight_files import find_files_to_shard
from thresher.models.logps import base_model
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.parallelize import ParallelContext, parallelize
from thresher.strategies.native.parameters import ParameterCounts
from thresher.strategies.native.train import NativeTrain, OptimizerSettings


def build_policy(
    config: DPOConfig, layout: Layout, *, device: torch.device | None = None, world: Group = SINGLE_PROCESS
) -> NativeTrain:
    """Load the policy, attach adapters if configured, and build its engine.

    device: the mapped one if absent. world: all processes of the policy.
    """
    role, args = config.actor_train, config.actor_train.model_args
    device = device or device_of(role)
    source = ModelSource(config.policy_path, args.master_dtype, args.attn_implementation, args.trust_remote_code)
    training = role.training_args
    dtype = DTYPES[args.dtype]
    module, parallel, counts = _load_and_parallelize(
        source, role, device, dtype, world, adapters=args, seed=config.seed
    )
    if training.gradient_checkpointing:
        base_model(module).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = OptimizerSettings(
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        epsilon=training.adam_epsilon,
        max_grad_norm=training.max_grad_norm,
    )
    _seed_dropout(config.seed, parallel)
    policy = NativeTrain(module, layout, dtype, optimizer, parallel, counts)
    if training.torch_compile:
        policy.compile()
    return policy


def _seed_dropout(seed: int, parallel: ParallelContext) -> None:
    """Seed dropout differently on each data-parallel and context-parallel rank, and equally on all tp ranks."""
    cp_rank = 0 if parallel.context_parallel is None else parallel.context_parallel.rank
    ranks = [parallel.dp_group.rank, cp_rank] if cp_rank else [parallel.dp_group.rank]
    set_seed(int(np.random.SeedSequence([seed, *ranks]).generate_state(1)[0]) if any(ranks) else seed)


@dataclass(frozen=True)
class ModelSource:
    """Path of a model and how to load it."""

    path: str | None
    dtype: str
    attn_implementation: str | None
    trust_remote_code: bool

    def load(self) -> PreTrainedModel:
        return load_model(self.named_path, **self._settings)

    def empty(self) -> PreTrainedModel:
        return build_on_meta(self.named_path, **self._settings)

    @property
    def named_path(self) -> str:
        return named_model(self.path)

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "dtype": DTYPES[self.dtype],
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
        }


def _load_and_parallelize(
    source: ModelSource,
    role: RoleConfig,
    device: torch.device,
    compute_dtype: torch.dtype,
    world: Group,
    *,
    adapters: ModelArgs | None = None,
    seed: int = 0,
) -> tuple[torch.nn.Module, ParallelContext, ParameterCounts]:
    """Load a full copy of a model, or this process's shards of it; the counts are those of the whole model."""
    sizes = axis_sizes(role)
    if sizes.is_replicated:
        model = source.load()
        module = model if adapters is None else attach_adapters(model, adapters)
        counts = ParameterCounts.of(module)
        parallel = ParallelContext(dp_group=DataParallelGroup(world.rank, world.size, world.group))
        module = module.to(device)
    else:
        model = source.empty()
        module = model if adapters is None else attach_adapters(model, adapters)
        counts = ParameterCounts.of(module)
        axes = role.strategy_args.axes
        parallel = parallelize(
            model,
            source.named_path,
            Mesh.create(sizes, device),
            compute_dtype,
            device,
            offload=axes.cpu_offload,
            virtual_pp_size=axes.virtual_pp_size,
        )
    if module is not model:
        init_adapters(model, seed)
    return module, parallel, counts


def attach_adapters(model: PreTrainedModel, args: ModelArgs) -> torch.nn.Module:
    """Add LoRA adapters if the config sets lora_rank."""
    if args.lora_rank is None:
        return model
    return attach_lora(
        model, rank=args.lora_rank, alpha=args.lora_alpha, dropout=args.lora_dropout, target=args.lora_target
    )


def build_reference(
    config: DPOConfig,
    layout: Layout,
    *,
    device: torch.device | None = None,
    world: Group = SINGLE_PROCESS,
    role: RoleConfig | None = None,
) -> NativeInfer:
    """Load the frozen model. It computes in the policy's precision; otherwise margins would not be 0 at step 0.

    role: the section that sets its sharding and, if device is absent, its device; `reference` if absent.
    """
    role = role or config.reference
    attention = config.reference.model_args.attn_implementation or config.actor_train.model_args.attn_implementation
    source = ModelSource(config.reference_path, config.reference_master_dtype, attention, config.trusts_reference_code)
    device = device or device_of(role)
    dtype = DTYPES[config.reference_dtype]
    model, parallel, _ = _load_and_parallelize(source, role, device, dtype, world)
    model.requires_grad_(False)
    reference = NativeInfer(model.eval(), layout, dtype, parallel)
    if config.actor_train.training_args.torch_compile:
        reference.compile()  # compiled layers round differently
    return reference


def device_of(role: RoleConfig) -> torch.device:
    """The device of a single process: the mapped GPU, the first one, or the CPU."""
    if not role.device_mapping and not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", role.device_mapping[0] if role.device_mapping else 0)


def check_engine(config: DPOConfig, section: Literal["actor_train", "reference"]) -> None:
    """Reject a strategy that does not exist and axes that the model does not support, before any worker starts."""
    role: RoleConfig = getattr(config, section)
    check_strategy(role, section)
    path = config.policy_path if section == "actor_train" else config.reference_path
    if axis_sizes(role).is_replicated or path is None:
        return
    find_files_to_shard(path)
    args = config.actor_train.model_args
    model_config = load_model_config(path, trust_remote_code=config.trusts_reference_code or args.trust_remote_code)
    layout, _ = choose_layout(config.layout, [model_config], args.attn_implementation, pad_id=0)
    check_axes(role, section, model_config, layout)
