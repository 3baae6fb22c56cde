"""The trainer of one rank, resumed from a checkpoint and checked at step 0."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from thresher.builders.checkpoints import build_checkpoint_manager, config_changes
from thresher.builders.inputs import RunInputs, build_eval_batching, build_micro_batching
from thresher.builders.objective import build_schedule
from thresher.builders.reference import Reference, frozen_policy_digest, reference_digest
from thresher.builders.run import stop_file
from thresher.builders.samples import build_sampler
from thresher.config import DPOConfig
from thresher.engines.engine import TrainEngine
from thresher.errors import CheckpointError
from thresher.redact import redact
from thresher.reference.fingerprint import config_digest
from thresher.training.trainer import (
    POLICY_SETTINGS,
    POLICY_WEIGHTS,
    REFERENCE_SETTINGS,
    RankTrainer,
    SavedRun,
    ScoredDataset,
    TrainerSettings,
    TrainingData,
)


def build_trainer(inputs: RunInputs, policy: TrainEngine, reference: Reference) -> RankTrainer:
    """Assemble the trainer of a rank."""
    config = inputs.config
    plan, train, validation = inputs.plan, inputs.train, inputs.validation
    data = TrainingData(
        plan,
        ScoredDataset(train, reference.train),
        None if validation is None else ScoredDataset(validation, reference.validation),
        build_micro_batching(inputs, policy.hidden_size),
        build_eval_batching(inputs),
    )
    settings = TrainerSettings(
        build_schedule(config, plan.num_steps),
        logging_steps=config.logging_steps,
        max_consecutive_skipped_steps=config.max_consecutive_skipped_steps,
        seed=config.seed,
        stop_file=stop_file(config),
        async_save=config.async_save,
        collective_timeout=timedelta(seconds=config.heartbeat_timeout),
    )
    identity: dict[str, str | int] = {
        "data": train.digest,
        "pairs per step": plan.pairs_per_step,
        "seed": plan.seed,
        "reference": reference_digest(config, inputs.mode, inputs.frozen_weights),
        POLICY_SETTINGS: config_digest(
            str(config.policy_path), trust_remote_code=config.actor_train.model_args.trust_remote_code
        ),
    }
    # checkpoints contain neither the config.json of models nor weights that are not trained
    if inputs.mode != "none":
        trusts = config.trusts_reference_code
        identity[REFERENCE_SETTINGS] = config_digest(str(config.reference_path), trust_remote_code=trusts)
    if (frozen := frozen_policy_digest(inputs)) is not None:
        identity[POLICY_WEIGHTS] = frozen
    saved = SavedRun(build_checkpoint_manager(config), identity, redact(config.model_dump(mode="json")))
    sampler = build_sampler(inputs, policy, reference.synced)
    return RankTrainer(policy, inputs.objective, data, settings, saved, extra=reference.synced, sampler=sampler)


def resume(trainer: RankTrainer, config: DPOConfig, checkpoint: Path) -> list[str]:
    """Restore a checkpoint; return notes on changed settings, and on what could not be restored."""
    try:
        changes = [f"changed since the checkpoint: {change}" for change in config_changes(checkpoint, config)]
        return [*changes, *trainer.resume(checkpoint)]
    # verified digests do not prove that a run wrote the files
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{checkpoint} contains a state that no run writes ({error!r}); resume from another checkpoint"
        ) from error
