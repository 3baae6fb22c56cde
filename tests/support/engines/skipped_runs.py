"""Three steps, one of them skipped or discarded; returns what each process skipped, and its state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.engines.parity import LOSSES_WITH_REFERENCE, NUM_STEPS, Case, NativeEngine, make_trainer
from thresher.engines.accumulate import StepDiscarded
from thresher.engines.engine import TrainEngine
from thresher.losses.objective import Objective
from thresher.training.records import SkippedStep
from thresher.training.trainer import RankTrainer


@dataclass(frozen=True)
class Skips:
    """Per step of a process: digest of weights and optimizer state, and why the step was skipped."""

    before: str
    digests: list[str]
    skipped: list[SkippedStep | None]
    steps: list[int]


def train_with_nonfinite_step(case: Case, policy_dir: Path, reference_dir: Path, scale: float = 1.0) -> Skips:
    """Train on this rank; scale multiplies the objective of rank 0 in the second step."""
    engine = case.engine or NativeEngine()
    policy, reference = engine.policy(case, policy_dir), engine.reference(case, reference_dir)
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


def train_with_discarded_step(case: Case, policy_dir: Path, reference_dir: Path) -> list[float]:
    """Train in one process; a stop is requested in the second step, which is then made again. Return gradient norms."""
    engine = case.engine or NativeEngine()
    policy, reference = engine.policy(case, policy_dir), engine.reference(case, reference_dir)
    trainer = make_trainer(policy, reference.score if case.loss in LOSSES_WITH_REFERENCE else None, case)
    norms = []
    for step in range(NUM_STEPS):
        if step == 1:
            with (
                patch.object(trainer, "_sees_stop_file", lambda: True),
                patch("thresher.engines.accumulate.SECONDS_BEFORE_DISCARD", 0.0),
                pytest.raises(StepDiscarded),
            ):
                trainer.training_step()
        trainer.training_step()
        norms.append(trainer.state.grad_norm)
    return norms


def with_scale(trainer: RankTrainer, scale: float) -> None:
    objective: Objective = trainer.objective
    trainer.objective = replace(objective, terms=((objective.terms[0][0], scale),))


def digest(policy: TrainEngine) -> str:
    """SHA-256 of the weights and moments on this process."""
    tensors = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in policy.weights().values()]
    for state in policy.parameters.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().numpy().tobytes())
    return content.hexdigest()


@dataclass(frozen=True)
class ScaledSteps:
    """Loss scale after each attempt of the first step, and the digest after each step that was made."""

    scales: list[float]
    digests: list[str]


def train_until_the_scale_fits(case: Case, policy_dir: Path, reference_dir: Path) -> ScaledSteps:
    """Repeat the first step on this rank until its gradient does not overflow, then make the others."""
    engine = case.engine or NativeEngine()
    policy, reference = engine.policy(case, policy_dir), engine.reference(case, reference_dir)
    trainer = make_trainer(policy, reference.score, case)
    scales, digests = [], []
    before = digest(policy)
    while True:
        trainer.training_step()
        scales.append(policy.loss_scale)
        if trainer.skipped is None:
            break
        assert trainer.skipped.reason == "overflow"
        assert digest(policy) == before
        trainer.state.step = 0
    digests.append(digest(policy))
    for _ in range(NUM_STEPS - 1):
        trainer.training_step()
        digests.append(digest(policy))
    return ScaledSteps(scales, digests)
