"""Train a policy that `builders` makes from a config, on the ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.strategies.parity import LAYOUTS, PAIRS, Case, Outcome, gather_full, make_trainer
from thresher.builders.engines import build_policy, build_reference
from thresher.config import parse_config
from thresher.data.pair import PairBatch
from thresher.distributed.groups import Group
from thresher.distributed.mesh import ParallelDims


def config_of(policy_dir: Path, num_workers: int, axes: dict[str, int], **model_args: Any):
    return parse_config(
        {
            "pretrain": str(policy_dir),
            "seed": 5,
            "actor_train": {
                "model_args": {"dtype": "fp32", **model_args},
                "training_args": {"learning_rate": 1e-3, "adam_epsilon": 1e-5},
                "num_workers": num_workers,
                "strategy_args": {"strategy_config": axes},
            },
        }
    )


def train_from_config(
    policy_dir: Path, axes: dict[str, int], layout: str, loss: str = "sigmoid", **model_args: Any
) -> Outcome:
    """Three steps after the start-up check; the reference is the base of the adapter, or a copy of the policy."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    world = Group(dist.get_rank(), size, dist.group.WORLD) if size > 1 else Group()
    config = config_of(policy_dir, size, axes, **model_args)
    policy = build_policy(config, LAYOUTS[layout], device=torch.device("cpu"), world=world)
    policy.check_logps(PairBatch(np.arange(2), tuple(PAIRS[:2])))
    if "lora_rank" in model_args:
        score = policy.score_base
    else:
        score = build_reference(config, LAYOUTS[layout], world=world, role=config.actor_train).score
    trainer = make_trainer(policy, score, Case(ParallelDims(dp_replicate=policy.dp_group.size), layout, loss))
    metrics, norms = [], []
    for _ in range(3):
        metrics.append({name: metric.mean for name, metric in trainer.training_step().items()})
        norms.append(trainer.state.grad_norm)
    weights = {name: gather_full(weight) for name, weight in policy.weights().items()}
    return Outcome(metrics, norms, weights, trainer.state.skipped_steps)
