"""Resolve `reference.mode`: choose a mode for `auto`, and reject modes that cannot work."""

from __future__ import annotations

from typing import Literal

from thresher.errors import UserError

ReferenceMode = Literal["precompute", "concurrent", "adapter", "none"]


def resolve_mode(
    requested: Literal["auto", "precompute", "concurrent", "adapter", "none"],
    *,
    loss_needs_reference: bool,
    policy_has_adapter: bool,
    same_weights: bool,
    is_synced: bool,
    why_not_base: str | None = None,
) -> ReferenceMode:
    """Choose how the reference is scored.

    same_weights: policy and reference start from the same model. is_synced: TR-DPO updates the reference.
    why_not_base: why the policy's base model is not the policy at step 0, with an adapter that does not start at zero.
    """
    if not loss_needs_reference:
        if requested not in ("auto", "none") or is_synced:
            raise UserError(
                "this loss needs no reference, so the reference settings would do nothing; remove reference.mode and "
                "reference.sync_steps, or choose a loss that needs one"
            )
        return "none"
    if is_synced and policy_has_adapter:
        raise UserError("reference.sync_steps does not work with a LoRA policy; remove it or train all weights")
    if requested == "adapter" and not (policy_has_adapter and same_weights):
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
    if policy_has_adapter and same_weights and why_not_base is None:
        return "adapter"
    return "concurrent" if is_synced else "precompute"
