"""Bytes of all live tensors of a process during a step, counted by a dispatch mode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from tests.support.strategies.config_runs import config_of, world_of_pool
from tests.support.strategies.held_memory import count_before_zero_grad
from tests.support.strategies.parity import LAYOUTS, objective_of
from thresher.builders.engines import build_policy
from thresher.data.pair import Pair, PairBatch
from thresher.losses.pairs import ChosenRejectedLogps, ResponseLogps
from thresher.plan.simulate.counters import LiveBytes
from thresher.strategies.accumulate import MicroBatch


@dataclass(frozen=True)
class StepBytes:
    """Weights, gradients and optimizer state before they are cleared, and the peak of a step."""

    weights: int
    gradients: int
    optimizer: int
    peak: int


def pairs_of(count: int, prompt: int, response: int) -> list[Pair]:
    draw = np.random.default_rng(0)

    def ids(length: int) -> Any:
        return draw.integers(3, 90, size=length).astype(np.int32)

    return [Pair(ids(prompt), ids(response), ids(response + 1)) for _ in range(count)]


def live_bytes_of_step(
    model_dir: Path, axes: dict[str, int], layout: str, pairs: list[Pair], num_batches: int, **settings: Any
) -> StepBytes:
    """Peak of the second step, in which every rank has `num_batches` micro-batches of the same pairs."""
    world = world_of_pool()
    config = config_of(model_dir, world.size, axes, **settings)
    policy: Any = build_policy(config, LAYOUTS[layout], device=torch.device("cpu"), world=world)
    batch = PairBatch(np.arange(len(pairs)), tuple(pairs))

    def side(lengths: list[int]) -> ResponseLogps:
        return ResponseLogps(torch.zeros(sum(lengths)), torch.tensor(lengths))

    reference = ChosenRejectedLogps(
        side([len(pair.chosen_ids) for pair in pairs]), side([len(pair.rejected_ids) for pair in pairs])
    )
    micro_batches = [MicroBatch(batch, reference)] * num_batches

    def step() -> None:
        num_pairs = len(pairs) * num_batches * policy.dp_group.size
        policy.train_step(micro_batches, objective_of("sigmoid"), num_pairs_in_step=num_pairs, learning_rate=1e-4)

    step()
    held = count_before_zero_grad(policy)
    counter = LiveBytes()
    counter.add(policy.model.parameters())
    counter.add(tree_leaves(policy.parameters.optimizer.state_dict()["state"]))
    with counter:
        step()
    return StepBytes(held[0].parameters, held[0].gradients, held[0].optimizer, counter.peak)
