"""Runs that score between steps and before they resume, when gathered weights could be stale."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.support.engines import saved_runs
from tests.support.engines.parity import (
    NUM_STEPS,
    PAIRS,
    Case,
    gather_full,
    load_parallel,
    make_policy,
    make_trainer,
)
from thresher.data.example import ExampleBatch
from thresher.engines.engine import TrainEngine
from thresher.engines.native.parallelize import ParallelContext
from thresher.models.loading.load import load_model

_BATCH = ExampleBatch(np.arange(3), tuple(PAIRS[:3]))


@dataclass(frozen=True)
class ScoredRun:
    """logps: of some pairs, before each step and after the last."""

    losses: list[float]
    grad_norms: list[float]
    logps: list[list[float]]
    weights: dict[str, Tensor]


def train_and_score(case: Case, model_dir: Path) -> ScoredRun:
    """Three steps on this rank, with the start-up check before them and an evaluation around each."""
    is_alone = case.sizes.num_processes == 1
    loaded = (load_model(str(model_dir)), ParallelContext()) if is_alone else load_parallel(case, model_dir)
    policy = make_policy(case, *loaded)
    trainer = make_trainer(policy, None, case)
    policy.check_logps(_BATCH)
    losses, norms, logps = [], [], [_logps(policy)]
    for _ in range(NUM_STEPS):
        losses.append(trainer.training_step()["loss"].mean)
        norms.append(trainer.state.grad_norm)
        logps.append(_logps(policy))
    return ScoredRun(losses, norms, logps, {name: gather_full(weight) for name, weight in policy.weights().items()})


def resume_after_scoring(run: saved_runs.Run) -> tuple[list[float], saved_runs.Result]:
    """Train, score, load a checkpoint, score and continue; return the logps right after loading too."""
    assert run.start is not None
    policy = saved_runs.build_policy(run)
    trainer = saved_runs.build_trainer(policy, run)
    trainer.training_step()
    _logps(policy)
    trainer.resume(run.start)
    logps = _logps(policy)
    losses = []
    while trainer.state.step < run.until:
        losses.append(trainer.training_step()["loss"].mean)
    weights = saved_runs.gathered(policy.weights())
    return logps, saved_runs.Result(losses, weights, saved_runs.moments_of(policy), [torch.get_rng_state()], [])


def _logps(policy: TrainEngine) -> list[float]:
    sides = policy.score(_BATCH)
    return torch.cat([sides.chosen.values, sides.rejected.values]).tolist()
