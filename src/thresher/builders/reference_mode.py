"""The reference as the config describes it: its mode, its files, and settings without effect. Loads no model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.models.loading.adapters import AdapterFiles
from thresher.reference.fingerprint import model_digest, with_adapter

ReferenceMode = Literal["precompute", "concurrent", "adapter", "none"]


def reference_mode(config: DPOConfig, objective: Objective) -> ReferenceMode:
    """Choose how the reference is scored: resolve `auto`, and reject modes that cannot work."""
    requested, is_synced = config.reference.mode, config.reference.sync_steps is not None
    if is_synced and config.actor_train.model_args.freeze_module_prefix:
        raise UserError("reference.sync_steps does not work with freeze_module_prefix; remove one of them")
    if not objective.needs_reference:
        if requested not in ("auto", "none") or is_synced:
            raise UserError(
                "this loss needs no reference, so the reference settings would do nothing; remove reference.mode and "
                "reference.sync_steps, or choose a loss that needs one"
            )
        return "none"
    if is_synced and config.uses_lora:
        raise UserError("reference.sync_steps does not work with a LoRA policy; remove it or train all weights")
    has_base, why_not_base = config.uses_lora and same_initial_weights(config), _why_not_base(config)
    if requested == "adapter" and not has_base:
        raise UserError(
            "reference.mode=adapter uses the policy's base model as the reference, so it needs "
            "actor_train.model_args.lora_rank and no other reference model; use auto"
        )
    if requested == "adapter" and why_not_base is not None:
        raise UserError(
            f"reference.mode=adapter compares with the model without its adapter, but {why_not_base}, so margins would "
            "not start at 0; use auto, precompute or concurrent"
        )
    if requested != "auto":
        return requested
    if has_base and why_not_base is None:
        return "adapter"
    return "concurrent" if is_synced else "precompute"


def _why_not_base(config: DPOConfig) -> str | None:
    """Return why the policy at step 0 is not its model without the adapter."""
    if config.actor_train.model_args.adapter_name_or_path is not None:
        return "the policy starts from adapter_name_or_path"
    if config.actor_train.model_args.starts_from_weights:
        return f"lora_init {config.actor_train.model_args.lora_init} moves a part of its weights into the adapter"
    return None


def initial_adapter(config: DPOConfig) -> str | None:
    """The adapter of a reference that is the policy at step 0."""
    return config.actor_train.model_args.adapter_name_or_path if same_initial_weights(config) else None


def merged_adapters(config: DPOConfig, *, of_policy: bool = True) -> tuple[AdapterFiles, ...]:
    """The adapters that are merged into the policy's model, or into the reference if that is the same model."""
    if not of_policy and not same_initial_weights(config):
        return ()
    return tuple(map(AdapterFiles.find, config.actor_train.model_args.merge_adapters))


def same_initial_weights(config: DPOConfig) -> bool:
    """Whether policy and reference start from the same model."""
    one, other = config.reference_path, config.policy_path
    return one == other or (one is not None and other is not None and Path(one).resolve() == Path(other).resolve())


def frozen_weights_digest(config: DPOConfig, mode: ReferenceMode) -> str | None:
    """Digest the files of the weights that are not trained; None if all weights are trained."""
    if mode != "none":
        return reference_weights_digest(config)
    # checkpoints do not contain what is not trained: a resumed run must recognize it, even if no loss compares with it
    return model_digest(str(config.policy_path), merged_adapters(config)) if config.freezes_weights else None


def reference_weights_digest(config: DPOConfig) -> str:
    """Digest the files of the model that the config describes as the reference, whether or not a loss needs it."""
    weights = model_digest(str(config.reference_path), merged_adapters(config, of_policy=False))
    adapter = initial_adapter(config)
    return weights if adapter is None else with_adapter(weights, AdapterFiles.find(adapter))


def reference_has_workers(config: DPOConfig, mode: ReferenceMode) -> bool:
    """Return whether the reference has workers; otherwise the policy's workers score it, on the policy's mesh.

    The same model on the same mesh gives the same logps, so the margin at step 0 is 0. A synced reference copies the
    weights of the policy's shards. torchrun starts the processes of the policy only.
    """
    reference = config.reference
    if config.runtime == "torchrun" or mode not in ("precompute", "concurrent") or reference.sync_steps is not None:
        return False
    has_own = bool(reference.non_default("num_workers", "device_mapping", "strategy_args"))
    return has_own or not same_initial_weights(config)


def unused_settings(config: DPOConfig, mode: ReferenceMode) -> list[str]:
    """Name the reference settings that this run ignores: a warning, not an error, so that a loss can be swapped."""
    reference = config.reference
    unused: list[str] = []
    if mode in ("adapter", "none"):
        args = reference.model_args
        unused += [f"model_args.{name}" for name in args.non_default(*type(args).model_fields)]
    if mode != "precompute":
        unused += reference.non_default("infer_batch_size", "cache_dir")
    if not (mode == "concurrent" and config.uses_ray and reference_has_workers(config, mode)):
        unused += reference.non_default("prefetch_steps")
    if mode in ("adapter", "none"):
        unused += reference.non_default("strategy_args", "device_mapping", "num_workers")
    notes = [f"reference.{name} has no effect: the reference mode is {mode}" for name in unused]
    if mode == "concurrent" and config.uses_ray and not reference_has_workers(config, mode):
        notes += [
            f"reference.{name} has no effect: a synced reference runs in the policy workers"
            for name in reference.non_default("device_mapping", "num_workers")
        ]
    if not (config.uses_ray and reference_has_workers(config, mode)) and reference.non_default("system_envs"):
        notes.append("reference.system_envs has no effect: the reference has no separate workers")
    return notes
