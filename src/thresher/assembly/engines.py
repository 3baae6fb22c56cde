"""Models on their engines: the policy with its optimizer, the frozen reference."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, set_seed

from thresher.config import DPOConfig, ModelArgs
from thresher.config.roles import RoleConfig
from thresher.errors import UserError
from thresher.models.layouts import Layout
from thresher.models.load import DTYPES, load_model
from thresher.models.lora import attach_lora
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.train import NativeTrain, OptimizerSettings

_BUILT_STRATEGIES = {"actor_train": ("fsdp2_train",), "reference": ("hf_infer", "fsdp2_infer")}


def build_policy(config: DPOConfig, layout: Layout) -> NativeTrain:
    """Load the policy, attach adapters where asked, and give it to its engine."""
    role = config.actor_train
    _check_engine(role, "actor_train")
    set_seed(config.seed)  # adapters start from this seed, and so does every later draw
    model = _load(config.policy_path, role.model_args)
    if role.training_args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module: torch.nn.Module = model
    args = role.model_args
    if args.lora_rank is not None:
        module = attach_lora(
            model, rank=args.lora_rank, alpha=args.lora_alpha, dropout=args.lora_dropout, target=args.lora_target
        )
    training = role.training_args
    optimizer = OptimizerSettings(
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        epsilon=training.adam_epsilon,
        max_grad_norm=training.max_grad_norm,
    )
    return NativeTrain(module.to(device_of(role)), layout, DTYPES[args.dtype], optimizer)


def build_reference(config: DPOConfig, layout: Layout) -> NativeInfer:
    """Load the frozen model; it computes in the policy's precision, or step 0 would not start at margin 0."""
    role = config.reference
    _check_engine(role, "reference")
    if role.model_args.lora_rank is not None:
        raise UserError("reference.model_args.lora_rank has no effect: the reference is frozen; remove it")
    given = role.model_args.model_fields_set
    policy_args = config.actor_train.model_args
    merged = role.model_args.model_copy(
        update={
            name: getattr(policy_args, name)
            for name in ("dtype", "master_dtype", "attn_implementation")
            if name not in given
        }
    )
    model = _load(config.reference_path, merged)
    model.requires_grad_(False)
    return NativeInfer(model.eval().to(device_of(role)), layout, DTYPES[merged.dtype])


def device_of(role: RoleConfig) -> torch.device:
    """One process trains on one device: the mapped one, the first GPU, or the CPU."""
    mapping = role.device_mapping or []
    if len(mapping) > 1:
        raise UserError(
            f"device_mapping names {len(mapping)} devices, and one process trains on one; name one device or leave "
            "device_mapping out"
        )
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", mapping[0] if mapping else 0)


def _load(path: str | None, args: ModelArgs) -> PreTrainedModel:
    if path is None:
        raise UserError("no model is named; set pretrain to a model directory or a .gguf file")
    return load_model(
        path,
        dtype=DTYPES[args.master_dtype],
        attn_implementation=args.attn_implementation,
        trust_remote_code=args.trust_remote_code,
    )


def _check_engine(role: RoleConfig, section: str) -> None:
    name, built = role.strategy_args.strategy_name, _BUILT_STRATEGIES[section]
    if name not in built:
        raise UserError(
            f"{section}.strategy_args.strategy_name {name} cannot run in one process; use {' or '.join(built)}"
        )
    sizes = {key: size for key, size in role.strategy_args.strategy_config.items() if size != 1}
    if sizes:
        raise UserError(
            f"{section}.strategy_args.strategy_config {sizes} asks for several processes or unknown settings, and this "
            "run has one; leave it out"
        )
