"""The reference of a run: mode, scorers for both splits, identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from thresher.builders.data import probe_pairs
from thresher.builders.engines import build_reference
from thresher.builders.inputs import RunInputs
from thresher.builders.precompute import ProgressCallback, plan_precompute
from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.reference.fingerprint import frozen_digest, weights_digest
from thresher.reference.modes import ReferenceMode, resolve_mode
from thresher.reference.scorers import LiveReference
from thresher.reference.synced import SyncedReference
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.train import NativeTrain
from thresher.training.trainer import ReferenceScorer


@dataclass(frozen=True)
class ReferenceBundle:
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
    inputs: RunInputs,
    policy: NativeTrain,
    progress: ProgressCallback = lambda what, done, total: None,
    *,
    device: torch.device | None = None,
    weights: str | None = None,
) -> ReferenceBundle:
    """Decide how the reference is scored and load it where it is a model of its own that has something to score.

    device is where such a model goes, the mapped one if absent; weights is the digest of the frozen weights, for
    callers that know it already.
    """
    mode = reference_mode(config, inputs.objective)
    probe = probe_pairs(inputs.train)
    same_weights = same_initial_weights(config)
    notes = unused_settings(config, mode, works_ahead=False)
    weights = weights or frozen_weights_digest(config, mode)
    digest = reference_digest(config, mode, weights)
    if mode == "none":
        return ReferenceBundle(mode, None, None, digest, False, notes=notes)
    if mode == "precompute":
        job = plan_precompute(
            config,
            inputs.layout,
            inputs.train,
            inputs.plan.visited_pairs(),
            inputs.validation,
            probe,
            str(weights),
            policy.device,
            num_visits=inputs.plan.num_visits,
            progress=progress,
        )
        return ReferenceBundle(
            mode, job.train, job.validation, digest, same_weights, score_in_advance=job.run, notes=notes
        )
    if mode == "adapter":
        live = LiveReference(policy.score_base, policy.device)
        return ReferenceBundle(mode, live, live, digest, True, notes=notes)
    # beside the policy and split as it is: a synced reference takes its weights from there
    world = policy.dp_group.world
    role = config.actor_train if world.size > 1 else config.reference
    reference = build_reference(config, inputs.layout, device=device, world=world, role=role)
    reference.check_logps(probe)
    live = LiveReference(reference.score, policy.device)
    synced = None
    if config.reference.sync_steps is not None:
        _check_sync(reference, policy)
        synced = SyncedReference(reference, policy, config.reference.sync_steps, config.reference.sync_alpha)
    return ReferenceBundle(mode, live, live, digest, same_weights, synced, notes=notes)


def reference_mode(config: DPOConfig, objective: Objective) -> ReferenceMode:
    """Resolve `auto`, and refuse what cannot be."""
    return resolve_mode(
        config.reference.mode,
        loss_needs_reference=objective.needs_reference,
        policy_has_adapter=config.uses_lora,
        same_weights=same_initial_weights(config),
        is_synced=config.reference.sync_steps is not None,
    )


def same_initial_weights(config: DPOConfig) -> bool:
    """Say whether policy and reference start from the same model."""
    one, other = config.reference_path, config.policy_path
    return one == other or (one is not None and other is not None and Path(one).resolve() == Path(other).resolve())


def frozen_weights_digest(config: DPOConfig, mode: ReferenceMode) -> str | None:
    """Digest the files of the weights that training leaves alone; None: it leaves none alone."""
    if mode != "none":
        return weights_digest(str(config.reference_path))
    # an adapter's base is in no checkpoint: a resumed run must know it again, also when nothing is compared with it
    return weights_digest(str(config.policy_path)) if config.uses_lora else None


def reference_digest(config: DPOConfig, mode: ReferenceMode, weights: str | None) -> str:
    """Identify the frozen weights as they are held in memory, given the digest of their files."""
    policy_dtype = config.actor_train.model_args.master_dtype
    return frozen_digest(weights, policy_dtype if mode == "none" else config.reference_master_dtype)


def unused_settings(config: DPOConfig, mode: ReferenceMode, *, works_ahead: bool) -> tuple[str, ...]:
    """Name settings of the reference that this mode does not read: told, not refused, so that a loss can be swapped.

    works_ahead: the reference has workers of its own that score coming steps.
    """
    own = config.reference.model_args
    idle = (
        [f"model_args.{name}" for name in own.non_default(*type(own).model_fields)]
        if mode in ("adapter", "none")
        else []
    )
    idle += config.reference.non_default("infer_batch_size", "cache_dir") if mode != "precompute" else []
    idle += config.reference.non_default("prefetch_steps") if not works_ahead else []
    idle += config.reference.non_default("device_mapping", "num_workers") if mode in ("adapter", "none") else []
    return tuple(f"reference.{name} has no effect here: the reference's mode is {mode}" for name in idle)


def _check_sync(reference: NativeInfer, policy: NativeTrain) -> None:
    own = {name: tensor.shape for name, tensor in reference.weights().items()}
    theirs = {name: tensor.shape for name, tensor in policy.weights().items()}
    if own != theirs:
        raise UserError("reference.sync_steps needs a reference of the policy's shape; remove it or use the same model")
