"""The reference mode of a run, and the reference settings that it leaves without effect. Loads no model."""

from __future__ import annotations

from pathlib import Path

from thresher.config import DPOConfig
from thresher.losses.objective import Objective
from thresher.reference.modes import ReferenceMode, resolve_mode


def reference_mode(config: DPOConfig, objective: Objective) -> ReferenceMode:
    """Resolve `auto`, and reject impossible modes."""
    return resolve_mode(
        config.reference.mode,
        loss_needs_reference=objective.needs_reference,
        policy_has_adapter=config.uses_lora,
        same_weights=same_initial_weights(config),
        is_synced=config.reference.sync_steps is not None,
    )


def same_initial_weights(config: DPOConfig) -> bool:
    """Whether policy and reference start from the same model."""
    one, other = config.reference_path, config.policy_path
    return one == other or (one is not None and other is not None and Path(one).resolve() == Path(other).resolve())


def reference_has_workers(config: DPOConfig, mode: ReferenceMode) -> bool:
    """Whether, on Ray, the reference has workers; a synced one copies the policy's weights and runs in its workers."""
    return mode == "precompute" or (mode == "concurrent" and config.reference.sync_steps is None)


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
    return notes
