"""What ranks do in tests of DeepSpeed alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.support.engines.parity import PAIRS, Case, Outcome, make_trainer, train_parallel
from tests.support.engines.saved_runs import Run, build_policy, build_trainer
from thresher.data.example import ExampleBatch
from thresher.errors import UserError


def score_partitioned(case: Case, model_dir: Path) -> list[list[float]]:
    """Score the pairs of this rank with the reference of a case; return the logps of each batch."""
    reference = case.engine.reference(case, model_dir)
    reference.check_logps(ExampleBatch(np.arange(2), tuple(PAIRS[:2])))
    pairs = PAIRS[reference.dp_group.rank :: reference.dp_group.size]
    batches = [tuple(pairs[i : i + 3]) for i in range(0, len(pairs), 3)]
    scored = [reference.score(ExampleBatch(np.arange(len(batch)), batch)) for batch in batches]
    return [torch.cat([sides.chosen.values, sides.rejected.values]).tolist() for sides in scored]


def step_and_undo(run: Run) -> tuple[float, float]:
    """Save, make a step, load, and make the same step again; return both losses of the second step after each."""
    policy = build_policy(run)
    policy.snapshot({})(run.root)
    dist.barrier()
    losses = []
    for _ in range(2):
        trainer = build_trainer(policy, run)
        trainer.training_step()
        losses.append(trainer.training_step()["loss"].mean)
        policy.load(run.root)
    return losses[0], losses[1]


def load_error(run: Run, checkpoint: Path) -> str:
    """The error of a rank that loads a checkpoint."""
    try:
        build_policy(run).load(checkpoint)
    except UserError as error:
        return str(error)
    return "none"


def score_base_and_policy(case: Case, model_dir: Path) -> tuple[list[float], list[float], list[float]]:
    """Logps before training, then after a step with the adapter disabled and with it."""
    policy = case.engine.policy(case, model_dir)
    batch = ExampleBatch(np.arange(4), tuple(PAIRS[:4]))
    before = policy.score(batch).chosen.values.tolist()
    make_trainer(policy, None, case).training_step()
    return before, policy.score_base(batch).chosen.values.tolist(), policy.score(batch).chosen.values.tolist()


def train_without_a_process_group(case: Case, policy_dir: Path, reference_dir: Path) -> Outcome:
    """Train as a process that the runtime starts alone."""
    dist.destroy_process_group()
    return train_parallel(case, policy_dir, reference_dir)


def train_in_two_groups(case: Case, policy_dir: Path, reference_dir: Path, store: Path) -> tuple[Outcome, Outcome]:
    """Train, and again in a new process group, as a launched program that calls `train` twice."""
    first = train_parallel(case, policy_dir, reference_dir)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
    return first, train_parallel(case, policy_dir, reference_dir)
