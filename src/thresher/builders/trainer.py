"""The trainer of one rank; local runs and Ray workers build it the same way."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from thresher.builders.checkpoints import build_checkpoint_manager, config_changes
from thresher.builders.inputs import RunInputs, build_eval_batching, build_micro_batching
from thresher.builders.objective import build_schedule
from thresher.builders.reference import ReferenceBundle, frozen_policy_digest, reference_digest
from thresher.builders.run import stop_file
from thresher.builders.samples import build_sampler
from thresher.config import DPOConfig
from thresher.errors import CheckpointError
from thresher.redact import redact
from thresher.reference.fingerprint import config_digest
from thresher.reference.step_zero_check import check_step_zero
from thresher.strategies.strategy import TrainStrategy
from thresher.training.loop import TrainingProgress
from thresher.training.trainer import (
    POLICY_SETTINGS,
    POLICY_WEIGHTS,
    REFERENCE_SETTINGS,
    RankTrainer,
    ScoredDataset,
    TrainerSettings,
)


@dataclass(frozen=True)
class TrainerBundle:
    """A trainer with its reference; notes are warnings to show the user."""

    trainer: RankTrainer
    reference: ReferenceBundle
    notes: tuple[str, ...]
    dtype: str

    @property
    def progress(self) -> TrainingProgress:
        return TrainingProgress(self.trainer.state.step, self.trainer.last_evaluation)

    def begin(self, *, to_evaluate: bool = False) -> None:
        """Precompute the reference, check step 0 and restart the clock, all before the first step.

        A run that has made all steps needs no reference, unless it begins `to_evaluate`.
        """
        trainer = self.trainer
        if to_evaluate or trainer.state.step < trainer.plan.num_steps:
            self.reference.score_in_advance()
        if trainer.state.step == 0 and self.reference.equals_policy:
            first = trainer.first_micro_batch()
            if first is not None:
                forwards = self.reference.forwards
                check_step_zero(trainer.strategy, first, trainer.objective, self.dtype, forwards)
        trainer.restart_clock()


def build_trainer(
    config: DPOConfig, inputs: RunInputs, policy: TrainStrategy, reference: ReferenceBundle, checkpoint: Path | None
) -> TrainerBundle:
    """Assemble the trainer of a rank, and resume from a checkpoint if there is one."""
    plan, train, validation = inputs.plan, inputs.train, inputs.validation
    trainer = RankTrainer(
        strategy=policy,
        objective=inputs.objective,
        plan=plan,
        micro_batching=build_micro_batching(config, inputs, policy.hidden_size),
        schedule=build_schedule(config, plan.num_steps),
        train=ScoredDataset(train, reference.train),
        validation=None if validation is None else ScoredDataset(validation, reference.validation),
        settings=TrainerSettings(
            evaluation=build_eval_batching(config, inputs),
            logging_steps=config.logging_steps,
            max_consecutive_skipped_steps=config.max_consecutive_skipped_steps,
            seed=config.seed,
            stop_file=stop_file(config),
            async_save=config.async_save,
            collective_timeout=timedelta(seconds=config.heartbeat_timeout),
        ),
        checkpoints=build_checkpoint_manager(config),
        identity={
            "data": train.digest,
            "pairs per step": plan.pairs_per_step,
            "seed": plan.seed,
            "reference": reference_digest(config, reference.mode, reference.weights),
            **_model_digests(config, reference),
        },
        config=redact(config.model_dump(mode="json")),
        extra=reference.synced,
        sampler=build_sampler(config, inputs, policy, reference),
    )
    notes: list[str] = []
    if checkpoint is not None:
        changes = [f"changed since the checkpoint: {change}" for change in config_changes(checkpoint, config)]
        notes = [*changes, *_resume(trainer, checkpoint)]
    return TrainerBundle(trainer, reference, tuple(notes), config.actor_train.model_args.dtype)


def _model_digests(config: DPOConfig, reference: ReferenceBundle) -> dict[str, str]:
    """Digests of what checkpoints do not contain of the models: config.json, and weights that are not trained."""
    models = {POLICY_SETTINGS: (config.policy_path, config.actor_train.model_args.trust_remote_code)}
    if reference.mode != "none":
        models[REFERENCE_SETTINGS] = (config.reference_path, config.trusts_reference_code)
    digests = {name: config_digest(str(path), trust_remote_code=trusts) for name, (path, trusts) in models.items()}
    frozen = frozen_policy_digest(config, reference)
    return digests if frozen is None else digests | {POLICY_WEIGHTS: frozen}


def _resume(trainer: RankTrainer, checkpoint: Path) -> list[str]:
    try:
        return trainer.resume(checkpoint)
    # verified digests do not prove that a run wrote the files
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{checkpoint} contains a state that no run writes ({error!r}); resume from another checkpoint"
        ) from error
