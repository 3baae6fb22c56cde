"""Three steps of which one is spoilt on a single rank: what each process skipped, and what it left as it was."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tests.support.strategies.parity import (
    LAYOUTS,
    LOSSES_WITH_REFERENCE,
    NUM_STEPS,
    Case,
    make_policy,
    make_trainer,
    split_model,
)
from thresher.losses.objective import Objective
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.train import NativeTrain
from thresher.training.skipped_steps import SkippedStep
from thresher.training.trainer import DPOTrainer


@dataclass(frozen=True)
class Skips:
    """What a process says after each step: its digest of weights and optimizer, and why the step was skipped."""

    before: str
    digests: list[str]
    skipped: list[SkippedStep | None]
    steps: list[int]


def train_spoilt(case: Case, policy_dir: Path, reference_dir: Path, scale: float = 1.0) -> Skips:
    """Train on every rank; where scale is not 1, the objective of the second step's own share alone is scaled."""
    policy = make_policy(case, *split_model(case, policy_dir))
    frozen, placement = split_model(case, reference_dir)
    reference = NativeInfer(frozen.requires_grad_(False), LAYOUTS[case.layout], case.dtype, placement)
    trainer = make_trainer(policy, reference.score if case.loss in LOSSES_WITH_REFERENCE else None, case)
    before, digests, skipped, steps = digest(policy), [], [], []
    for step in range(NUM_STEPS):
        # one rank alone: what the others compute is sound
        spoils = step == 1 and scale != 1.0 and policy.dp_group.rank == 0
        with_scale(trainer, scale if spoils else 1.0)
        trainer.training_step()
        digests.append(digest(policy))
        skipped.append(trainer.skipped)
        steps.append(trainer.state.step)
    return Skips(before, digests, skipped, steps)


def with_scale(trainer: DPOTrainer, scale: float) -> None:
    objective: Objective = trainer.objective
    trainer.objective = replace(objective, terms=((objective.terms[0][0], scale),))


def digest(policy: NativeTrain) -> str:
    """Every bit of what this process holds of weights and moments."""
    tensors = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in policy.weights().values()]
    for state in policy._optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().numpy().tobytes())
    return content.hexdigest()
