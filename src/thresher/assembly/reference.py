"""The reference of a run: mode, scorers for both splits, identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from thresher.assembly.engines import build_reference
from thresher.config import DPOConfig
from thresher.data.batch import PairBatch
from thresher.data.plan import PairIds, Plan
from thresher.data.store import PairStore
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.models.layouts import Layout
from thresher.reference.modes import Mode, resolve_mode
from thresher.reference.scorers import LiveReference, PrecomputedReference, weights_digest
from thresher.reference.synced import SyncedReference
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.train import NativeTrain
from thresher.trainer import ReferenceScorer

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ReferenceParts:
    """What the trainer needs of the reference.

    digest names its weights. equals_policy holds at step 0. score_in_advance does the work of mode precompute; it is
    left to the caller, so that a run that cannot start is told so before hours of scoring.
    """

    mode: str
    train: ReferenceScorer | None
    validation: ReferenceScorer | None
    digest: str
    equals_policy: bool
    synced: SyncedReference | None = None
    score_in_advance: Callable[[], None] = lambda: None
    notes: tuple[str, ...] = ()


def build_reference_parts(
    config: DPOConfig,
    objective: Objective,
    policy: NativeTrain,
    layout: Layout,
    plan: Plan,
    train: PairStore,
    validation: PairStore | None,
    probe: PairBatch,
    progress: Progress,
    device: torch.device | None = None,
) -> ReferenceParts:
    """Decide how the reference is scored and load it where it is a model of its own; on the mapped device if absent."""
    same_weights = starts_alike(config)
    mode = reference_mode(config, objective)
    notes = idle_settings(config, mode, works_ahead=False)
    if mode == "none":
        # an adapter's base is in no checkpoint: a resumed run must know it again, also when nothing is compared with it
        return ReferenceParts(mode, None, None, weights_digest(policy.frozen_weights()), False, notes=notes)
    if mode == "adapter":
        live = LiveReference(policy.score_base, policy.device)
        return ReferenceParts(mode, live, live, weights_digest(policy.frozen_weights()), True, notes=notes)
    reference = build_reference(config, layout, device=device)
    reference.check_logps(probe)
    digest = weights_digest(reference.weights())
    if mode == "concurrent":
        live = LiveReference(reference.score, policy.device)
        synced = None
        if config.reference.sync_steps is not None:
            _check_sync(reference, policy)
            synced = SyncedReference(reference, policy, config.reference.sync_steps, config.reference.sync_alpha)
        return ReferenceParts(mode, live, live, digest, same_weights, synced, notes=notes)

    return _scored_in_advance(config, reference, policy, plan, train, validation, digest, same_weights, progress)


def reference_mode(config: DPOConfig, objective: Objective) -> Mode:
    return resolve_mode(
        config.reference.mode,
        loss_needs_reference=objective.needs_reference,
        policy_has_adapter=config.uses_lora,
        same_weights=starts_alike(config),
        is_synced=config.reference.sync_steps is not None,
    )


def starts_alike(config: DPOConfig) -> bool:
    """Say whether policy and reference start from the same model."""
    return _same_place(config.reference_path, config.policy_path)


def idle_settings(config: DPOConfig, mode: Mode, *, works_ahead: bool) -> tuple[str, ...]:
    """Name settings of the reference that this mode does not read: told, not refused, so that a loss can be swapped.

    works_ahead: the reference has workers of its own that score coming steps.
    """
    own = config.reference.model_args
    idle = [f"model_args.{name}" for name in own.turned(*type(own).model_fields)] if mode in ("adapter", "none") else []
    idle += config.reference.turned("infer_batch_size") if mode != "precompute" else []
    idle += config.reference.turned("steps_ahead") if not works_ahead else []
    idle += config.reference.turned("device_mapping", "num_workers") if mode in ("adapter", "none") else []
    return tuple(f"reference.{name} has no effect here: the reference's mode is {mode}" for name in idle)


def _check_sync(reference: NativeInfer, policy: NativeTrain) -> None:
    own = {name: tensor.shape for name, tensor in reference.weights().items()}
    theirs = {name: tensor.shape for name, tensor in policy.weights().items()}
    if own != theirs:
        raise UserError("reference.sync_steps needs a reference of the policy's shape; remove it or use the same model")


def _scored_in_advance(
    config: DPOConfig,
    reference: NativeInfer,
    policy: NativeTrain,
    plan: Plan,
    train: PairStore,
    validation: PairStore | None,
    digest: str,
    same_weights: bool,
    progress: Progress,
) -> ReferenceParts:
    size = config.reference.infer_batch_size
    training = PrecomputedReference(size, policy.device)
    held_out = None if validation is None else PrecomputedReference(size, policy.device)
    holder = [reference]

    def score_in_advance() -> None:
        reference = holder.pop()  # the last hold on the model: its memory goes to the policy when this returns
        _fill(training, train, reference, plan.visited_pairs(), plan.num_visits, "training", progress)
        if held_out is not None and validation is not None:
            every = np.arange(len(validation), dtype=np.int64)
            _fill(held_out, validation, reference, every, len(every), "held-out", progress)

    return ReferenceParts("precompute", training, held_out, digest, same_weights, score_in_advance=score_in_advance)


def _fill(
    table: PrecomputedReference,
    store: PairStore,
    reference: NativeInfer,
    pair_ids: PairIds,
    num_visits: int,
    what: str,
    progress: Progress,
) -> None:
    table.fill(
        store,
        reference.score,
        pair_ids,
        num_visits=num_visits,
        advance=lambda done, total: progress(f"scoring the reference: {what} pairs", done, total),
    )


def _same_place(one: str | None, other: str | None) -> bool:
    return one == other or (one is not None and other is not None and Path(one).resolve() == Path(other).resolve())
