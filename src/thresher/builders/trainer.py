"""The trainer of one rank, resumed from a checkpoint if there is one."""

from __future__ import annotations

from pathlib import Path

from thresher.builders.checkpoints import build_checkpoint_manager, config_changes
from thresher.builders.data import describe_mixture
from thresher.builders.engines import quantization_of
from thresher.builders.inputs import RunInputs, build_eval_batching, build_micro_batching
from thresher.builders.objective import build_schedule
from thresher.builders.reference import frozen_policy_digest, reference_digest
from thresher.builders.samples import build_sampler
from thresher.config import DPOConfig
from thresher.engines.engine import TrainEngine
from thresher.errors import CheckpointError
from thresher.reference.fingerprint import config_digest
from thresher.reference.scorers import Reference
from thresher.training.trainer import (
    MIXTURE,
    POLICY_SETTINGS,
    POLICY_WEIGHTS,
    QUANTIZATION,
    REFERENCE_SETTINGS,
    RankTrainer,
)


def build_trainer(inputs: RunInputs, policy: TrainEngine, reference: Reference) -> RankTrainer:
    """Assemble the trainer of a rank."""
    config, plan = inputs.config, inputs.plan
    mixture = describe_mixture(inputs.train, plan)
    identity: dict[str, str | int] = {
        "data": inputs.train.digest,
        "pairs per step": plan.pairs_per_step,
        "seed": plan.seed,
        MIXTURE: mixture or "none",
        QUANTIZATION: str(quantization_of(config.actor_train.model_args) or "none"),
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
    return RankTrainer(
        config,
        policy,
        inputs.objective,
        plan,
        train=inputs.train_examples,
        validation=inputs.validation_examples,
        reference=reference,
        micro_batching=build_micro_batching(inputs, policy.hidden_size),
        eval_batching=build_eval_batching(inputs),
        schedule=build_schedule(config, plan.num_steps),
        checkpoints=build_checkpoint_manager(config),
        identity=identity,
        sampler=build_sampler(inputs, policy, reference.synced),
    )


def resume(trainer: RankTrainer, config: DPOConfig, checkpoint: Path) -> list[str]:
    """Restore a checkpoint; return notes on changed settings, and on what could not be restored."""
    try:
        changes = [f"changed since the checkpoint: {change}" for change in config_changes(checkpoint, config)]
        return [*changes, *trainer.resume(checkpoint)]
    # verified digests do not prove that a run wrote the files
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{checkpoint} contains a state that no run writes ({error!r}); resume from a different checkpoint"
        ) from error
