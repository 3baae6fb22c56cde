"""The reference of a run: mode, scorers for both splits, identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from thresher.assembly.engines import build_reference
from thresher.config import DPOConfig
from thresher.data.plan import PairIds, Plan
from thresher.data.store import PairStore
from thresher.losses.objective import Objective
from thresher.models.layouts import Layout
from thresher.reference.modes import resolve_mode
from thresher.reference.scorers import LiveReference, PrecomputedReference, weights_digest
from thresher.reference.synced import SyncedReference
from thresher.strategies.native.train import NativeTrain
from thresher.trainer import ReferenceScorer

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ReferenceParts:
    """What the trainer needs of the reference. digest names its weights; equals_policy holds at step 0."""

    mode: str
    train: ReferenceScorer | None
    validation: ReferenceScorer | None
    digest: str
    equals_policy: bool
    synced: SyncedReference | None = None


def build_reference_parts(
    config: DPOConfig,
    objective: Objective,
    policy: NativeTrain,
    layout: Layout,
    plan: Plan,
    train: PairStore,
    validation: PairStore | None,
    progress: Progress,
) -> ReferenceParts:
    """Decide how the reference is scored and, where that happens in advance, score it."""
    same_weights = config.reference_path == config.policy_path
    mode = resolve_mode(
        config.reference.mode,
        loss_needs_reference=objective.needs_reference,
        policy_has_adapter=config.uses_lora,
        same_weights=same_weights,
        is_synced=config.reference.sync_steps is not None,
    )
    if mode == "none":
        return ReferenceParts(mode, None, None, "none", equals_policy=False)
    if mode == "adapter":
        live = LiveReference(policy.score_base)
        return ReferenceParts(mode, live, live, weights_digest(policy.frozen_weights()), equals_policy=True)
    reference = build_reference(config, layout)
    digest = weights_digest(reference.weights())
    if mode == "concurrent":
        live = LiveReference(reference.score)
        synced = None
        if config.reference.sync_steps is not None:
            synced = SyncedReference(reference, policy, config.reference.sync_steps, config.reference.sync_alpha)
        return ReferenceParts(mode, live, live, digest, same_weights, synced)

    def table(store: PairStore, pair_ids: PairIds, num_visits: int, what: str) -> PrecomputedReference:
        scored = PrecomputedReference(config.reference.infer_batch_size, policy.device)
        scored.fill(
            store,
            reference.score,
            pair_ids,
            num_visits=num_visits,
            advance=lambda done, total: progress(f"scoring the reference: {what}", done, total),
        )
        return scored

    return ReferenceParts(
        mode,
        table(train, plan.visited_pairs(), plan.num_visits, "training pairs"),
        None
        if validation is None
        else table(validation, np.arange(len(validation)), len(validation), "held-out pairs"),
        digest,
        same_weights,
    )
