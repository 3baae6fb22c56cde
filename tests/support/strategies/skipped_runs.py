"""Three steps, one of them non-finite on a single rank; returns what each process skipped and its state digests."""

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
    load_parallel,
    make_policy,
    make_trainer,
)
from thresher.losses.objective import Objective
from thresher.strategies.native.infer import NativeInfer
from thresher.strategies.native.train import NativeTrain
from thresher.training.skipped_steps import SkippedStep
from thresher.training.trainer import DPOTrainer


@dataclass(frozen=True)
class Skips:
    """Per step of a process: digest of weights and optimizer state, and why the step was skipped."""

    before: str
    digests: list[str]
    skipped: list[SkippedStep | None]
    steps: list[int]


def train_with_nonfinite_step(case: Case, policy_dir: Path, reference_dir: Path, scale: float = 1.0) -> Skips:
    """Train on this rank; scale multiplies the objective of rank 0 in the second step."""
    policy = make_policy(case, *load_parallel(case, policy_dir))
    frozen, parallel = load_parallel(case, reference_dir)
    reference = NativeInfer(frozen.requires_grad_(False), LAYOUTS[case.layout], case.dtype, parallel)
    trainer = make_trainer(policy, reference.score if case.loss in LOSSES_WITH_REFERENCE else None, case)
    before, digests, skipped, steps = digest(policy), [], [], []
    for step in range(NUM_STEPS):
        # only on rank 0: the other ranks compute finite values
        overflows = step == 1 and scale != 1.0 and policy.dp_group.rank == 0
        with_scale(trainer, scale if overflows else 1.0)
        trainer.training_step()
        digests.append(digest(policy))
        skipped.append(trainer.skipped)
        steps.append(trainer.state.step)
    return Skips(before, digests, skipped, steps)


def with_scale(trainer: DPOTrainer, scale: float) -> None:
    objective: Objective = trainer.objective
    trainer.objective = replace(objective, terms=((objective.terms[0][0], scale),))


def digest(policy: NativeTrain) -> str:
    """SHA-256 of the weights and moments on this process."""
    tensors = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in policy.weights().values()]
    for state in policy._optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().numpy().tobytes())
    return content.hexdigest()
