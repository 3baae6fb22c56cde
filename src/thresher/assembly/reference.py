"""The reference of a run: mode, scorers for both splits, identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thresher.assembly.engines import build_reference
from thresher.assembly.precompute import Announce, Progress, plan_precompute
from thresher.config import DPOConfig
from thresher.data.batch import PairBatch
from thresher.data.plan import Plan
from thresher.data.store import PairStore
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.models.layouts import Layout
from thresher.reference.identity import frozen_digest, weights_digest
from thresher.reference.modes import Mode, resolve_mode
from thresher.reference.scorers import LiveReference
from thresher.reference.synced import SyncedReference
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.train import NativeTrain
from thresher.trainer import ReferenceScorer


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
    announce: Announce = lambda line: None,
) -> ReferenceParts:
    """Decide how the reference is scored and load it where it is a model of its own that has something to score."""
    mode = reference_mode(config, objective)
    same_weights = starts_alike(config)
    notes = _idle_settings(config, mode)
    if mode == "none":
        # an adapter's base is in no checkpoint: a resumed run must know it again, also when nothing is compared with it
        base = weights_digest(str(config.policy_path)) if config.uses_lora else None
        digest = frozen_digest(base, config.actor_train.model_args.master_dtype)
        return ReferenceParts(mode, None, None, digest, False, notes=notes)
    weights = weights_digest(str(config.reference_path))
    digest = frozen_digest(weights, config.reference_master_dtype)
    if mode == "precompute":
        job = plan_precompute(
            config,
            layout,
            train,
            plan.visited_pairs(),
            validation,
            probe,
            weights,
            policy.device,
            num_visits=plan.num_visits,
            announce=announce,
            progress=progress,
        )
        return ReferenceParts(
            mode, job.train, job.validation, digest, same_weights, score_in_advance=job.run, notes=notes
        )
    if mode == "adapter":
        live = LiveReference(policy.score_base, policy.device)
        return ReferenceParts(mode, live, live, digest, True, notes=notes)
    reference = build_reference(config, layout)
    reference.check_logps(probe)
    live = LiveReference(reference.score, policy.device)
    synced = None
    if config.reference.sync_steps is not None:
        _check_sync(reference, policy)
        synced = SyncedReference(reference, policy, config.reference.sync_steps, config.reference.sync_alpha)
    return ReferenceParts(mode, live, live, digest, same_weights, synced, notes=notes)


def reference_mode(config: DPOConfig, objective: Objective) -> Mode:
    """Resolve `auto`, and refuse what cannot be."""
    return resolve_mode(
        config.reference.mode,
        loss_needs_reference=objective.needs_reference,
        policy_has_adapter=config.uses_lora,
        same_weights=starts_alike(config),
        is_synced=config.reference.sync_steps is not None,
    )


def starts_alike(config: DPOConfig) -> bool:
    """Say whether policy and reference start from the same model."""
    one, other = config.reference_path, config.policy_path
    return one == other or (one is not None and other is not None and Path(one).resolve() == Path(other).resolve())


def _idle_settings(config: DPOConfig, mode: str) -> tuple[str, ...]:
    """Name settings of the reference that this mode does not read: told, not refused, so that a loss can be swapped."""
    own = config.reference.model_args
    idle = [f"model_args.{name}" for name in own.turned(*type(own).model_fields)] if mode in ("adapter", "none") else []
    idle += config.reference.turned("infer_batch_size", "cache_dir") if mode != "precompute" else []
    return tuple(f"reference.{name} has no effect here: the reference's mode is {mode}" for name in idle)


def _check_sync(reference: NativeInfer, policy: NativeTrain) -> None:
    own = {name: tensor.shape for name, tensor in reference.weights().items()}
    theirs = {name: tensor.shape for name, tensor in policy.weights().items()}
    if own != theirs:
        raise UserError("reference.sync_steps needs a reference of the policy's shape; remove it or use the same model")
