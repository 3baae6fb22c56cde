"""One rank's trainer, from its policy and reference to the first step: the same in one process and on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thresher.builders.data import check_pairs, probe_pairs
from thresher.builders.inputs import RunInputs
from thresher.builders.objective import build_schedule
from thresher.builders.reference import ReferenceBundle
from thresher.builders.run import build_checkpoint_manager, build_micro_batching, config_changes, trainer_settings
from thresher.config import DPOConfig
from thresher.config.stored import to_stored
from thresher.errors import CheckpointError
from thresher.redact import redact
from thresher.reference.step_zero_check import check_step_zero
from thresher.strategies.native.train import NativeTrain
from thresher.training.loop import TrainingProgress
from thresher.training.trainer import DPOTrainer, ScoredDataset


@dataclass(frozen=True)
class TrainerBundle:
    """A trainer with its reference; notes are lines for a person."""

    trainer: DPOTrainer
    reference: ReferenceBundle
    notes: tuple[str, ...]
    dtype: str

    @property
    def progress(self) -> TrainingProgress:
        return TrainingProgress(self.trainer.state.step, self.trainer.last_evaluation)

    def begin(self) -> None:
        """Do what comes between building and the first step: score in advance, check step 0, start the clock."""
        trainer = self.trainer
        if trainer.state.step < trainer.plan.num_steps:
            self.reference.score_in_advance()
        if trainer.state.step == 0 and self.reference.equals_policy:
            first = trainer.first_micro_batch()
            if first is not None:
                check_step_zero(trainer.strategy, first, trainer.objective, self.dtype)
        trainer.restart_clock()


def build_trainer(
    config: DPOConfig, inputs: RunInputs, policy: NativeTrain, reference: ReferenceBundle, checkpoint: Path | None
) -> TrainerBundle:
    """Put a rank's parts together and go on from a checkpoint where there is one."""
    plan, train, validation = inputs.plan, inputs.train, inputs.validation
    trainer = DPOTrainer(
        strategy=policy,
        objective=inputs.objective,
        plan=plan,
        micro_batching=build_micro_batching(config, inputs.layout, train, policy.hidden_size),
        schedule=build_schedule(config, plan.num_steps),
        train=ScoredDataset(train, reference.train),
        validation=None if validation is None else ScoredDataset(validation, reference.validation),
        settings=trainer_settings(config),
        checkpoints=build_checkpoint_manager(config),
        identity={
            "data": train.digest,
            "pairs per step": plan.pairs_per_step,
            "seed": plan.seed,
            "reference": reference.digest,
        },
        config=redact(to_stored(config)),
        extra=reference.synced,
    )
    notes = list(reference.notes)
    if checkpoint is not None:
        notes += [*config_changes(checkpoint, config), *_resume(trainer, checkpoint)]
    return TrainerBundle(trainer, reference, tuple(notes), config.actor_train.model_args.dtype)


def _resume(trainer: DPOTrainer, checkpoint: Path) -> list[str]:
    try:
        return trainer.resume(checkpoint)
    # digests show that its bytes are those that were written, not that a run wrote them
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{checkpoint} holds a state that no run writes ({error!r}); resume from another checkpoint"
        ) from error


def check_policy(config: DPOConfig, inputs: RunInputs, policy: NativeTrain) -> None:
    """Refuse pairs that the model cannot hold, and a model whose logps are not those of its own forward."""
    check_pairs(config, inputs.objective, policy.max_positions, [inputs.train, inputs.validation])
    policy.check_logps(probe_pairs(inputs.train))
