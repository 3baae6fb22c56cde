"""Models on their engines: the policy with its optimizer, the frozen reference."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel, set_seed

from thresher.config import DPOConfig, ModelArgs
from thresher.config.roles import RoleConfig
from thresher.errors import UserError
from thresher.models.layouts import Layout
from thresher.models.load import DTYPES, load_model
from thresher.models.lora import attach_lora
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.placement import Placement
from thresher.strategies.native.train import NativeTrain, OptimizerSettings
from thresher.strategies.ranks import DataRanks

_AXIS_SIZES = ("tp_size", "pp_size", "cp_size", "dp_replicate")
_BUILT_STRATEGIES = {"actor_train": ("fsdp2_train",), "reference": ("hf_infer", "fsdp2_infer")}


def build_policy(
    config: DPOConfig, layout: Layout, *, device: torch.device | None = None, ranks: DataRanks | None = None
) -> NativeTrain:
    """Load the policy, attach adapters where asked, and give it to its engine; on the mapped device if absent."""
    role, ranks = config.actor_train, ranks or DataRanks()
    set_seed(config.seed)  # adapters start from this seed, and so does every later draw
    args = role.model_args
    model = _load(config.policy_path, args.master_dtype, args.attn_implementation, args.trust_remote_code)
    if role.training_args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module = attach_adapters(model, args)
    training = role.training_args
    optimizer = OptimizerSettings(
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        epsilon=training.adam_epsilon,
        max_grad_norm=training.max_grad_norm,
    )
    if ranks.rank > 0:
        # every rank starts from the same adapters, and then draws its own dropout
        set_seed(int(np.random.SeedSequence([config.seed, ranks.rank]).generate_state(1)[0]))
    placement = Placement(ranks=ranks)
    policy = NativeTrain(module.to(device or device_of(role)), layout, DTYPES[args.dtype], optimizer, placement)
    if training.torch_compile:
        policy.compile()
    return policy


def attach_adapters(model: PreTrainedModel, args: ModelArgs) -> torch.nn.Module:
    """Add LoRA adapters where the config asks for them."""
    if args.lora_rank is None:
        return model
    return attach_lora(
        model, rank=args.lora_rank, alpha=args.lora_alpha, dropout=args.lora_dropout, target=args.lora_target
    )


def build_reference(config: DPOConfig, layout: Layout, *, device: torch.device | None = None) -> NativeInfer:
    """Load the frozen model; it computes in the policy's precision, or step 0 would not start at margin 0."""
    role = config.reference
    model = _load(
        config.reference_path,
        config.reference_master_dtype,
        role.model_args.attn_implementation or config.actor_train.model_args.attn_implementation,
        config.trusts_reference_code,
    )
    model.requires_grad_(False)
    return NativeInfer(model.eval().to(device or device_of(role)), layout, DTYPES[config.reference_dtype])


def device_of(role: RoleConfig) -> torch.device:
    """One process trains on one device: the mapped one, the first GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", role.device_mapping[0] if role.device_mapping else 0)


def _load(path: str | None, dtype: str, attn_implementation: str | None, trust_remote_code: bool) -> PreTrainedModel:
    if path is None:
        raise UserError("no model is named; set pretrain to a model directory or a .gguf file")
    return load_model(
        path,
        dtype=DTYPES[dtype],
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def check_engines(config: DPOConfig) -> None:
    """Refuse engines and axes that are not there."""
    for role, section in ((config.actor_train, "actor_train"), (config.reference, "reference")):
        _check_engine(role, section)


def _check_engine(role: RoleConfig, section: str) -> None:
    name, built = role.strategy_args.strategy_name, _BUILT_STRATEGIES[section]
    if name is not None and name not in built:
        raise UserError(
            f"{section}.strategy_args.strategy_name {name} is not available in this version; use {' or '.join(built)}"
        )
    for key, size in role.strategy_args.strategy_config.items():
        if key not in _AXIS_SIZES:
            raise UserError(
                f"{section}.strategy_args.strategy_config has an unknown key {key}; known: {', '.join(_AXIS_SIZES)}"
            )
        if size != 1:
            raise UserError(
                f"{section}.strategy_args.strategy_config.{key} is {size}, and this version has data parallelism only; "
                "set it to 1 or leave it out"
            )
