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
from thresher.errors import CheckpointError
from thresher.redact import redact
from thresher.reference.fingerprint import config_digest
from thresher.reference.step_zero_check import check_step_zero
from thresher.strategies.engine import TrainEngine
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
        **_model_digests(inputs),
    }
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


def check_first_step(trainer: RankTrainer, reference: Reference, dtype: str) -> None:
    """Check that policy and reference agree before the first step, if they start from the same weights."""
    if trainer.state.step == 0 and reference.equals_policy and (first := trainer.first_micro_batch()) is not None:
        check_step_zero(trainer.strategy, first, trainer.objective, dtype, reference.forwards)


def _model_digests(inputs: RunInputs) -> dict[str, str]:
    """Digests of what checkpoints do not contain of the models: config.json, and weights that are not trained."""
    config = inputs.config
    models = {POLICY_SETTINGS: (config.policy_path, config.actor_train.model_args.trust_remote_code)}
    if inputs.mode != "none":
        models[REFERENCE_SETTINGS] = (config.reference_path, config.trusts_reference_code)
    digests = {name: config_digest(str(path), trust_remote_code=trusts) for name, (path, trusts) in models.items()}
    frozen = frozen_policy_digest(inputs)
    return digests if frozen is None else digests | {POLICY_WEIGHTS: frozen}
