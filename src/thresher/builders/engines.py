"""The policy's engine with its optimizer, and the frozen reference's, each checked and built by its strategy."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Literal

import torch

from thresher.builders.reference_mode import initial_adapter
from thresher.config import DPOConfig, ModelArgs
from thresher.config.roles import RoleConfig
from thresher.config.strategies import strategy_names
from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.engines.engine import Engine, TrainEngine
from thresher.engines.spec import EngineCheck, ModelSource, ModelSpec, PolicySpec
from thresher.errors import UserError
from thresher.models.layouts import Layout, choose_layout
from thresher.models.loading.adapters import AdapterFiles, LoraSettings
from thresher.models.loading.load import DTYPES, load_model_config
from thresher.models.loading.trained import TrainedParts
from thresher.models.optimizations.compile import Compilation


def build_policy(
    config: DPOConfig, layout: Layout, *, device: torch.device | None = None, world: Group = SINGLE_PROCESS
) -> TrainEngine:
    """Build the policy with its strategy, by default on its mapped device."""
    spec = policy_spec(config, layout, device or device_of(config.actor_train), world)
    policy: TrainEngine = resolve_name(str(config.actor_train.strategy.build_train))(spec)
    return policy


def policy_spec(config: DPOConfig, layout: Layout, device: torch.device, world: Group) -> PolicySpec[Any]:
    role, args = config.actor_train, config.actor_train.model_args
    return PolicySpec(
        source=ModelSource(config.policy_path, args.master_dtype, args.attn_implementation, args.trust_remote_code),
        compute_dtype=DTYPES[args.dtype],
        layout=layout,
        device=device,
        world=world,
        settings=role.strategy_args.settings,
        compilation=compilation(config, device, role),
        training=role.training_args,
        model_args=args,
        trained=trained_parts(args),
        seed=config.seed,
    )


def compilation(config: DPOConfig, device: torch.device, role: RoleConfig) -> Compilation | None:
    """What is compiled of a role's model: as in the policy, since compiled operations round differently."""
    policy, setting = config.actor_train, config.actor_train.training_args.torch_compile
    is_optional = setting == "auto"
    if not setting or (is_optional and (device.type != "cuda" or policy.model_args.moe_aux_loss_coef)):
        return None
    parts = {each.strategy_args.settings.compiled_parts for each in (policy, role)}
    if None in parts:
        return None
    if policy.training_args.gradient_checkpointing == "selective":
        parts.add("functions")  # the results of a compiled layer cannot be kept one by one
    return Compilation("functions" if "functions" in parts else "layers", is_optional)


def trained_parts(args: ModelArgs) -> TrainedParts:
    """What the settings of a policy train; reject settings that contradict the adapter that training starts from."""
    adapter, lora = None, None
    if args.adapter_name_or_path is not None:
        adapter = AdapterFiles.find(args.adapter_name_or_path)
        target = args.lora_target if args.non_default("lora_target") else None
        adapter.check_settings(rank=args.lora_rank, alpha=args.lora_alpha, target=target)
    elif args.lora_rank is not None:
        lora = LoraSettings(args.lora_rank, args.lora_alpha, tuple(args.lora_target), args.lora_init)
    return TrainedParts(lora, adapter, args.lora_dropout, tuple(args.freeze_module_prefix))


def build_reference(
    config: DPOConfig,
    layout: Layout,
    *,
    device: torch.device | None = None,
    world: Group = SINGLE_PROCESS,
    role: RoleConfig | None = None,
) -> Engine:
    """Build the frozen model, by default on the device of its role.

    It computes in the policy's precision; otherwise margins would not be 0 at step 0. If the policy starts from an
    adapter on the same model, the reference has that adapter. role: sets its strategy, `reference` if absent.
    """
    role = role or config.reference
    spec = reference_spec(config, layout, device or device_of(role), world, role)
    reference: Engine = resolve_name(role.strategy.build_infer)(spec)
    return reference


def reference_spec(
    config: DPOConfig, layout: Layout, device: torch.device, world: Group, role: RoleConfig
) -> ModelSpec[Any]:
    path = initial_adapter(config)
    attention = config.reference.model_args.attn_implementation or config.actor_train.model_args.attn_implementation
    dtype = config.reference_master_dtype
    return ModelSpec(
        source=ModelSource(config.reference_path, dtype, attention, config.trusts_reference_code),
        compute_dtype=DTYPES[config.reference_dtype],
        layout=layout,
        device=device,
        world=world,
        settings=role.strategy_args.settings,
        adapter=None if path is None else AdapterFiles.find(path),
        compilation=compilation(config, device, role),
    )


def device_of(role: RoleConfig) -> torch.device:
    """The device of a single process: the mapped GPU, the first one, or the CPU."""
    if not role.device_mapping and not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", role.device_mapping[0] if role.device_mapping else 0)


def check_strategy(role: RoleConfig, section: str) -> None:
    """Reject a strategy of the other role, one that is not installed, and settings that do not fit the workers."""
    name, strategy = role.strategy_name, role.strategy
    needed: Literal["train", "infer"] = "train" if section == "actor_train" else "infer"
    if (strategy.build_train is not None) != (needed == "train"):
        available = " or ".join(strategy_names(needed))
        raise UserError(f"{section}.strategy_args.strategy_name is {name}; use {available}")
    if name == "hf_infer" and role.strategy_args.strategy_config:
        raise UserError(
            f"{section}.strategy_args.strategy_config has no effect with hf_infer, which keeps a full copy per worker; "
            "remove it, or set strategy_name to fsdp2_infer"
        )
    strategy.check_installed(name)
    try:
        role.strategy_args.settings.check_workers(role.num_processes)
    except ValueError as error:
        raise UserError(f"{section}{'.' if str(error).startswith('strategy') else ' '}{error}") from None


def check_engine(config: DPOConfig, section: Literal["actor_train", "reference"]) -> None:
    """Reject a strategy that cannot run, and what it does not support of the model, before any worker starts."""
    role: RoleConfig = getattr(config, section)
    check_strategy(role, section)
    path = config.policy_path if section == "actor_train" else config.reference_path
    if path is not None:
        check_model(config, section, role, path)


def check_model(config: DPOConfig, section: Literal["actor_train", "reference"], role: RoleConfig, path: str) -> None:
    """Reject a model that a role's strategy does not support; it may be the reference on the policy's mesh."""
    strategy, args = role.strategy, config.actor_train.model_args
    is_policy = section == "actor_train"
    dtype = args.dtype if is_policy else config.reference_dtype
    if dtype not in strategy.dtypes:
        raise UserError(
            f"{section}: {role.strategy_name} does not compute in {dtype}; set model_args.dtype to "
            f"{' or '.join(strategy.dtypes)}"
        )
    if not strategy.adapters and args.has_adapter:
        kind = "train" if is_policy else "infer"
        raise UserError(f"{section}: {role.strategy_name} does not support LoRA adapters; use fsdp2_{kind}")
    if strategy.check is None:
        return
    trusts = args.trust_remote_code if is_policy else config.trusts_reference_code
    request = EngineCheck(
        section=section,
        settings=role.strategy_args.settings,
        num_workers=role.num_processes,
        path=path,
        load_config=lambda: load_model_config(path, trust_remote_code=trusts),
        find_layout=lambda model: choose_layout(config.layout, [model], args.attn_implementation, pad_id=0)[0],
        dtype=dtype,
        master_dtype=args.master_dtype if is_policy else config.reference_master_dtype,
        trained=trained_parts(args) if is_policy else None,
        is_synced=config.reference.sync_steps is not None,
        training=config.actor_train.training_args,
        model_args=args,
        pairs_per_step=config.pairs_per_step,
    )
    resolve_name(strategy.check)(request)
