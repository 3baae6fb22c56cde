"""Models on their engines: the policy with its optimizer, the frozen reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, set_seed

from thresher.builders.axes import axis_sizes, check_axes, check_num_processes
from thresher.config import DPOConfig, ModelArgs
from thresher.config.roles import RoleConfig
from thresher.distributed.groups import SINGLE_PROCESS, DataParallelGroup, Group
from thresher.distributed.mesh import Mesh
from thresher.errors import UserError
from thresher.models.layouts import Layout
from thresher.models.layouts.choose import choose_layout
from thresher.models.loading.load import DTYPES, load_model, load_model_config
from thresher.models.loading.load_sharded import build_on_meta
from thresher.models.loading.lora import attach_lora, init_adapters
from thresher.models.logps import base_model
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.parallelize import ParallelContext, parallelize
from thresher.strategies.native.train import NativeTrain, OptimizerSettings

_BUILT_STRATEGIES = {"actor_train": ("fsdp2_train",), "reference": ("hf_infer", "fsdp2_infer")}


def build_policy(
    config: DPOConfig, layout: Layout, *, device: torch.device | None = None, world: Group = SINGLE_PROCESS
) -> NativeTrain:
    """Load the policy, attach adapters where asked, and give it to its engine; on the mapped device if absent.

    world is all of the policy's processes.
    """
    role, args = config.actor_train, config.actor_train.model_args
    device = device or device_of(role)
    source = ModelSource(config.policy_path, args.master_dtype, args.attn_implementation, args.trust_remote_code)
    training = role.training_args
    module, placement = _place(source, role, device, DTYPES[args.dtype], world, adapters=args, seed=config.seed)
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
    _seed_dropout(config.seed, placement)
    policy = NativeTrain(module, layout, DTYPES[args.dtype], optimizer, placement)
    if training.torch_compile:
        policy.compile()
    return policy


def _seed_dropout(seed: int, placement: ParallelContext) -> None:
    """Every data rank and every part of a row draws its own dropout; parts of one matrix draw alike."""
    part = 0 if placement.context_parallel is None else placement.context_parallel.rank
    place = [placement.dp_group.rank, part] if part else [placement.dp_group.rank]
    set_seed(int(np.random.SeedSequence([seed, *place]).generate_state(1)[0]) if any(place) else seed)


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from and how it is to be."""

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
        if self.path is None:
            raise UserError("no model is named; set pretrain to a model directory or a .gguf file")
        return self.path

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "dtype": DTYPES[self.dtype],
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
        }


def _place(
    source: ModelSource,
    role: RoleConfig,
    device: torch.device,
    compute_dtype: torch.dtype,
    world: Group,
    *,
    adapters: ModelArgs | None = None,
    seed: int = 0,
) -> tuple[torch.nn.Module, ParallelContext]:
    """Load a model whole on this process, or this process's part of one that several split."""
    sizes = axis_sizes(role)
    if sizes.is_replicated:
        plain = source.load()
        module = plain if adapters is None else attach_adapters(plain, adapters)
        placement = ParallelContext(dp_group=DataParallelGroup(world.rank, world.size, world.group))
        module = module.to(device)
    else:
        plain = source.empty()
        module = plain if adapters is None else attach_adapters(plain, adapters)
        axes = role.strategy_args.axes
        placement = parallelize(
            plain,
            source.named_path,
            Mesh.create(sizes, device),
            compute_dtype,
            device,
            offload=axes.cpu_offload,
            virtual_pp_size=axes.virtual_pp_size,
        )
    if module is not plain:
        init_adapters(plain, seed)
    return module, placement


def attach_adapters(model: PreTrainedModel, args: ModelArgs) -> torch.nn.Module:
    """Add LoRA adapters where the config asks for them."""
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
    """Load the frozen model; it computes in the policy's precision, or step 0 would not start at margin 0.

    role says how it is split, and on which device it is where that is not told: the reference's own, or the policy's.
    """
    role = role or config.reference
    attention = config.reference.model_args.attn_implementation or config.actor_train.model_args.attn_implementation
    source = ModelSource(config.reference_path, config.reference_master_dtype, attention, config.trusts_reference_code)
    device = device or device_of(role)
    model, placement = _place(source, role, device, DTYPES[config.reference_dtype], world)
    model.requires_grad_(False)
    return NativeInfer(model.eval(), layout, DTYPES[config.reference_dtype], placement)


def device_of(role: RoleConfig) -> torch.device:
    """One process trains on one device: the mapped one, the first GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", role.device_mapping[0] if role.device_mapping else 0)


def check_engines(config: DPOConfig) -> None:
    """Refuse engines and axes that are not there, or that a model cannot have, before any worker starts."""
    for role, section in ((config.actor_train, "actor_train"), (config.reference, "reference")):
        name, built = role.strategy_args.strategy_name, _BUILT_STRATEGIES[section]
        if name is not None and name not in built:
            raise UserError(
                f"{section}.strategy_args.strategy_name {name} is not available in this version; use "
                f"{' or '.join(built)}"
            )
        check_num_processes(role, section)
    _check_split(config.actor_train, "actor_train", config.policy_path, config)
    _check_split(config.reference, "reference", config.reference_path, config)


def _check_split(role: RoleConfig, section: str, path: str | None, config: DPOConfig) -> None:
    if axis_sizes(role).is_replicated or path is None:
        return
    if not Path(path).is_dir():
        raise UserError(
            f"{section} splits its model over {role.num_processes} workers, which is read from a directory with "
            f"safetensors, and {path} is none; convert it, or set {section}.strategy_args.strategy_config.dp_replicate="
            f"{role.num_processes} for a whole copy in every worker"
        )
    args = config.actor_train.model_args
    family = load_model_config(path, trust_remote_code=config.trusts_reference_code or args.trust_remote_code)
    layout, _ = choose_layout(config.layout, [family], args.attn_implementation, pad_id=0)
    check_axes(role, section, family, layout)
