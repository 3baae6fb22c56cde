"""Train a policy that `builders` makes from a config, on the ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.engines.parity import LAYOUTS, PAIRS, Case, Outcome, gather_full, make_trainer
from thresher.builders.engines import build_policy, build_reference
from thresher.config import DPOConfig, parse_config
from thresher.data.example import ExampleBatch
from thresher.distributed.groups import Group
from thresher.distributed.mesh import ParallelDims


def config_of(
    policy_dir: Path,
    num_workers: int,
    axes: dict[str, int],
    *,
    recompute: str = "off",
    strategy: str = "fsdp2_train",
    **model_args: Any,
) -> DPOConfig:
    return parse_config(
        {
            "pretrain": str(policy_dir),
            "seed": 5,
            "actor_train": {
                "model_args": {"dtype": "fp32", **model_args},
                "training_args": {
                    "learning_rate": 1e-3,
                    "adam_epsilon": 1e-5,
                    "gradient_checkpointing": recompute,
                },
                "num_workers": num_workers,
                "strategy_args": {"strategy_name": strategy, "strategy_config": axes},
            },
        }
    )


def train_from_config(
    policy_dir: Path, axes: dict[str, int], layout: str, loss: str = "sigmoid", **model_args: Any
) -> Outcome:
    """Three steps after the start-up check; the reference is the base of the adapter, or a copy of the policy."""
    world = world_of_pool()
    config = config_of(policy_dir, world.size, axes, **model_args)
    policy = build_policy(config, LAYOUTS[layout], device=torch.device("cpu"), world=world)
    policy.check_logps(ExampleBatch(np.arange(2), tuple(PAIRS[:2])))
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


def start_against_one_process(policy_dir: Path, axes: dict[str, int], dtype: str) -> tuple[float, dict[str, float]]:
    """Compare the policy with a reference that is a full copy in this process.

    Return the largest difference of a token's logps in nats, and the metrics of the first step.
    """
    world, device, layout = world_of_pool(), torch.device("cpu"), LAYOUTS["shared"]
    config = config_of(policy_dir, world.size, axes, dtype=dtype)
    policy = build_policy(config, layout, device=device, world=world)
    reference = build_reference(config, layout, device=device)
    batch = ExampleBatch(np.arange(4), tuple(PAIRS[4 * world.rank :][:4]))
    ours, theirs = policy.score(batch), reference.score(batch)
    distance = max(
        (ours.chosen.values - theirs.chosen.values).abs().max().item(),
        (ours.rejected.values - theirs.rejected.values).abs().max().item(),
    )
    trainer = make_trainer(policy, reference.score, Case(ParallelDims(dp_replicate=policy.dp_group.size)))
    return distance, {name: metric.mean for name, metric in trainer.training_step().items()}


def world_of_pool() -> Group:
    """All ranks of the pool; this process alone outside of one."""
    if not dist.is_initialized():
        return Group()
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
