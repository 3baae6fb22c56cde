"""A simulated rank counts what a real step of the same micro-batches sends, byte for byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.engines.config_runs import config_of
from tests.support.engines.real_steps import count_real_step, pairs_of
from tests.support.small_runs import save_small_tokenizer
from thresher.builders.hardware import GPUS
from thresher.plan.estimate import Estimate
from thresher.plan.simulate.run import simulate_stage
from thresher.plan.step import Cluster

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PAIRS = pairs_of(3, prompt=12, response=9)
SIZES = [(len(pair.prompt_ids), len(pair.chosen.ids), len(pair.rejected.ids)) for pair in PAIRS]
BF16: dict[str, Any] = {"dtype": "bf16"}
LORA: dict[str, Any] = {"lora_rank": 4, "lora_target": ["all-linear"]}


@dataclass(frozen=True)
class Run:
    axes: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    family: str = "llama"
    num_batches: int = 2

    def __str__(self) -> str:
        words = [
            *(f"{name} {size}" for name, size in self.axes.items()),
            *map(str, self.settings.values()),
            self.family,
        ]
        return "-".join(words).replace(" ", "_")


IN_CI = [
    Run({}, LORA | BF16),
    Run({"tp_size": 2}, {"recompute": "full"} | BF16, num_ranks=4),
    Run({"tp_size": 2, "sequence_parallel": True, "zero_stage": 1}, {"recompute": "selective"} | BF16, num_ranks=4),
    Run({"pp_size": 2, "virtual_pp_size": 2}, family="qwen2", num_batches=4),
    Run({"cp_size": 2, "dp_replicate": 2}, num_ranks=4),
]
BY_HAND = [
    Run({"zero_stage": 2}, BF16),
    Run({"dp_replicate": 2}),
    Run({"tp_size": 2}, LORA, family="qwen3"),
    Run({"cp_size": 2}, {"recompute": "selective"} | BF16),
    Run({"pp_size": 4}, num_ranks=4, num_batches=6),
    Run({"pp_size": 2, "pp_dtype": "bf16"}, BF16, num_ranks=4, num_batches=3),
    Run({"reduce_dtype": "bf16"}, BF16, family="gemma2"),
    Run({"pp_size": 2, "tp_size": 2}, family="qwen2", num_ranks=4),
]


def check(run: Run, model_dir, pool) -> None:
    save_small_tokenizer(model_dir)
    real: list[dict[str, int]] = pool.run(count_real_step, model_dir, run.axes, PAIRS, run.num_batches, run.settings)
    config = config_of(model_dir, run.num_ranks, run.axes, **run.settings)
    estimate = Estimate(config, Cluster(GPUS["h100"], 8, run.num_ranks))
    for stage in estimate.processes:
        counted = simulate_stage(estimate, stage, [SIZES] * run.num_batches).counted
        sent: Counter[str] = Counter()
        for each in counted.collectives:
            sent[each.kind] += each.payload
        assert sent == real[counted.rank], stage


@pytest.mark.parametrize("run", IN_CI, ids=str)
def test_a_simulated_step_sends_the_bytes_of_a_real_one(run, model_dir, pool_of):
    check(run, model_dir(run.family), pool_of(run.num_ranks))


@pytest.mark.hand  # CI simulates fewer runs
@pytest.mark.parametrize("run", BY_HAND, ids=str)
def test_a_simulated_step_of_another_run_sends_the_bytes_of_a_real_one(run, model_dir, pool_of):
    check(run, model_dir(run.family), pool_of(run.num_ranks))
