"""What a real step of given micro-batches sends, for comparison with a simulated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.engines.communication import by_kind
from tests.support.engines.config_runs import config_of, world_of_pool
from tests.support.engines.parity import LAYOUTS
from thresher.builders.engines import build_policy
from thresher.builders.objective import build_objective
from thresher.data.example import Example, ExampleBatch
from thresher.engines.accumulate import MicroBatch
from thresher.losses.pairs import ExampleLogps, ResponseLogps
from thresher.plan.simulate.counters import CommunicationCounter


def pairs_of(count: int, prompt: int, response: int) -> list[Example]:
    draw = np.random.default_rng(0)

    def ids(length: int) -> Any:
        return draw.integers(3, 90, size=length).astype(np.int32)

    return [Example.pair(ids(prompt), ids(response), ids(response + 1)) for _ in range(count)]


def count_real_step(
    model_dir: Path, axes: dict[str, int], pairs: list[Example], num_batches: int, settings: dict[str, Any]
) -> dict[str, int]:
    """Bytes of the collectives of a step by kind; every rank has `num_batches` micro-batches of the same pairs.

    The reference is the base of the adapter, scored in the step, or a cache, which sends nothing.
    """
    world = world_of_pool()
    config = config_of(model_dir, world.size, axes, **settings)
    policy: Any = build_policy(config, LAYOUTS["shared"], device=torch.device("cpu"), world=world)
    batch, objective = ExampleBatch(np.arange(len(pairs)), tuple(pairs)), build_objective(config)

    def side(lengths: list[int]) -> ResponseLogps:
        return ResponseLogps(torch.zeros(sum(lengths)), torch.tensor(lengths))

    cached = ExampleLogps.of(
        side([len(pair.chosen.ids) for pair in pairs]), side([len(pair.rejected.ids) for pair in pairs])
    )

    def step(num_batches: int) -> None:
        scores = policy.score_base if "lora_rank" in settings else lambda _: cached
        policy.train_step(
            [MicroBatch(batch, scores(batch)) for _ in range(num_batches)],
            objective,
            num_pairs_in_step=len(pairs) * num_batches * policy.dp_group.size,
            learning_rate=1e-4,
        )

    policy.score(batch)
    step(1)  # as the simulation: the stages of a pipeline exchange a message before the first step of a new length
    with CommunicationCounter() as counter:
        step(num_batches)
    return by_kind(counter.payloads)
