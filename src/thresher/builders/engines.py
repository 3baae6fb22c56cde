"""The policy's engine with its optimizer, and the frozen reference's, each checked and built by its strategy."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, Literal

import torch

from thresher.builders.objective import scores_steps_twice, trains_rewards
from thresher.builders.reference_mode import initial_adapter, merged_adapters
from thresher.config import DPOConfig, ModelArgs
from thresher.config.roles import RoleConfig
from thresher.config.strategies import strategy_names
from thresher.distributed.groups import SINGLE_PROCESS, Group
from thresher.engines.engine import Engine, TrainEngine
from thresher.engines.spec import ModelSpec
from thresher.errors import UserError
from thresher.models.layouts import Layout, choose_layout
from thresher.models.loading.adapters import AdapterFiles, LoraSettings
from thresher.models.loading.location import named_model
from thresher.models.loading.quantization import Quantization, import_bitsandbytes, stored_quantization
from thresher.models.loading.trained import TrainedParts
from thresher.models.optimizations.compile import Compilation
from thresher.models.probe import what_packed_rows_lack


def build_policy(
    config: DPOConfig, layout: Layout, *, device: torch.device | None = None, world: Group = SINGLE_PROCESS
) -> TrainEngine:
    """Build the policy with its strategy, by default on its mapped device."""
    role = config.actor_train
    spec = model_spec(config, "actor_train", role, lambda: layout, device or device_of(role), world)
    policy: TrainEngine = resolve_name(str(role.strategy.build_train))(spec)
    return policy


def model_spec(
    config: DPOConfig,
    section: Literal["actor_train", "reference"],
    role: RoleConfig,  # the policy's also for a reference on its mesh
    find_layout: Callable[[], Layout],
    device: torch.device,
    world: Group,
) -> ModelSpec[Any]:
    """Describe the model of a section to the engine of a role."""
    args, of_reference, is_policy = config.actor_train.model_args, config.reference.model_args, section == "actor_train"
    adapter = None if is_policy else initial_adapter(config)
    return ModelSpec(
        section=section,
        path=named_model(config.policy_path if is_policy else config.reference_path),
        dtype=args.dtype if is_policy else config.reference_dtype,
        master_dtype=args.master_dtype if is_policy else config.reference_master_dtype,
        attn_implementation=(None if is_policy else of_reference.attn_implementation) or args.attn_implementation,
        trust_remote_code=args.trust_remote_code if is_policy else config.trusts_reference_code,
        settings=role.strategy_args.settings,
        world=world,
        device=device,
        find_layout=find_layout,
        compilation=compilation(config, device, role),
        training=config.actor_train.training_args,
        model_args=args,
        pairs_per_step=config.pairs_per_step,
        seed=config.seed,
        is_synced=config.reference.sync_steps is not None,
        is_reward_model=is_policy and trains_rewards(config),
        scores_steps_twice=is_policy and scores_steps_twice(config),
        trained=trained_parts(args) if is_policy else TrainedParts(),
        quantization=quantization_of(args),
        adapter=None if adapter is None else AdapterFiles.find(adapter),
        merged_adapters=merged_adapters(config, of_policy=is_policy),
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
        lora = LoraSettings(
            args.lora_rank,
            args.lora_alpha,
            tuple(args.lora_target),
            args.lora_init,
            args.use_rslora,
            args.use_dora,
            args.lora_rank_pattern,
            args.lora_alpha_pattern,
            tuple(args.modules_to_save),
            tuple(args.lora_exclude),
        )
    return TrainedParts(lora, adapter, args.lora_dropout, tuple(args.freeze_module_prefix))


def quantization_of(args: ModelArgs) -> Quantization | None:
    return None if args.quantization is None else Quantization(**args.quantization.model_dump())


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
    spec = model_spec(config, "reference", role, lambda: layout, device or device_of(role), world)
    reference: Engine = resolve_name(role.strategy.build_infer)(spec)
    return reference


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
    if (config.policy_path if section == "actor_train" else config.reference_path) is not None:
        check_model(config, section, role)


def _check_quantized(
    config: DPOConfig, section: Literal["actor_train", "reference"], path: str, quantization: Quantization
) -> None:
    """Reject what needs dense weights, of a model that the run quantizes or whose files are quantized."""
    import_bitsandbytes()
    args, is_policy = config.actor_train.model_args, section == "actor_train"
    if args.quantization is not None and (stored := stored_quantization(path)) is not None:
        change = (
            "actor_train.model_args.quantization" if is_policy else "it, or use the policy's model in the same bits"
        )
        raise UserError(f"{section}: {path} is stored in {stored} and cannot be quantized again; remove {change}")
    initial = initial_adapter(config)
    adapter = trained_parts(args).adapter if is_policy else None if initial is None else AdapterFiles.find(initial)
    found = {
        f"lora_init {args.lora_init}": is_policy and args.starts_from_weights,
        "DoRA": (is_policy and args.use_dora) or (adapter is not None and adapter.use_dora),
        "merge_adapters": bool(merged_adapters(config, of_policy=is_policy)),
    }
    for name, is_on in found.items():
        if is_on:
            raise UserError(
                f"{section}: {name} needs dense weights, and those of {path} are in {quantization}; remove one of them"
            )


def check_model(config: DPOConfig, section: Literal["actor_train", "reference"], role: RoleConfig) -> None:
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
    path = named_model(config.policy_path if is_policy else config.reference_path)
    quantization = quantization_of(args) or stored_quantization(path)
    if quantization is not None and not strategy.quantization:
        raise UserError(
            f"{section}: {role.strategy_name} does not support weights in {quantization}; use fsdp2_train for "
            "actor_train, and the default for the reference"
        )
    if quantization is not None and is_policy and not args.has_adapter:
        raise UserError(
            f"{path} is stored in {quantization}, which cannot be trained; set actor_train.model_args.lora_rank, or "
            "use the original model"
        )
    if quantization is not None:
        _check_quantized(config, section, path, quantization)
    if is_policy and not strategy.reward_models and trains_rewards(config):
        raise UserError(f"{section}: {role.strategy_name} does not train reward models; use fsdp2_train")
    if strategy.check is None:
        return

    def find_layout() -> Layout:
        return choose_layout(
            config.layout, [spec.model_config], args.attn_implementation, pad_id=0, probe=what_packed_rows_lack
        )[0]

    spec = model_spec(config, section, role, find_layout, torch.device("cpu"), Group(size=role.num_processes))
    _ = spec.merged  # finds adapters that cannot be merged
    resolve_name(strategy.check)(spec)
