"""The logps of a step per token, and the metrics that an engine makes of them, on the ranks of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.support.engines.config_runs import config_of, world_of_pool
from tests.support.engines.parity import LAYOUTS, PAIRS, objective_of
from tests.support.tiny_run import PairsInMemory
from thresher.builders.engines import build_policy
from thresher.engines.accumulate import MicroBatch
from thresher.losses.pairs import ExampleLogps, ResponseLogps

NUM_PAIRS = 12


@dataclass(frozen=True)
class SummedStep:
    """tokens: (policy, reference) per token of each response, chosen and rejected in turn, of this data rank."""

    data_rank: int
    tokens: list[tuple[list[float], list[float]]]
    metrics: dict[str, float]


def train_step(model_dir: Path, axes: dict[str, int], layout: str) -> SummedStep:
    """One step against a reference near the policy; return its metrics over all ranks."""
    world = world_of_pool()
    config = config_of(model_dir, world.size, axes)
    policy = build_policy(config, LAYOUTS[layout], device=torch.device("cpu"), world=world)
    rank, num_ranks = policy.dp_group.rank, policy.dp_group.size
    source, micro_batches, tokens = PairsInMemory(PAIRS), [], []
    for ids in np.split(np.arange(rank, NUM_PAIRS, num_ranks), 2):
        batch = source.read(ids)
        scored = policy.score(batch)
        reference = ExampleLogps.of(_near(scored.chosen), _near(scored.rejected))
        micro_batches.append(MicroBatch(batch, reference))
        for ours, theirs in ((scored.chosen, reference.chosen), (scored.rejected, reference.rejected)):
            parts = [side.values.double().split(side.lengths.tolist()) for side in (ours, theirs)]
            tokens.append([(one.tolist(), two.tolist()) for one, two in zip(*parts, strict=True)])
    outcome = policy.train_step(micro_batches, objective_of("sigmoid"), num_pairs_in_step=NUM_PAIRS, learning_rate=0.0)
    chosen, rejected = tokens[0] + tokens[2], tokens[1] + tokens[3]
    in_turn = [each for pair in zip(chosen, rejected, strict=True) for each in pair]
    return SummedStep(rank, in_turn, {name: metric.mean for name, metric in outcome.metrics.items()})


def _near(side: ResponseLogps) -> ResponseLogps:
    noise = torch.randn(side.values.shape, generator=torch.Generator().manual_seed(0))
    return ResponseLogps(side.values + 0.1 * noise, side.lengths)
