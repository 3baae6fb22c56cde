"""The expected time of a step, against steps that torchtitan has published, and the MFU of docs/guides/gpu.md."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import pytest
from transformers import AutoModelForCausalLM

from tests.support.planned_runs import PlannedRun, estimate_of
from tests.support.published_models import config_of
from thresher.builders.hardware import GPUS, Compiled
from thresher.builders.memory import ModelSize, Process
from thresher.config.roles import TrainingArgs
from thresher.plan.step import Cluster, step_flops, step_time
from thresher.plan.workload import Rows
from thresher.strategies.native.build import axis_sizes
from thresher.strategies.native.declaration import FSDP2Settings

SEQUENCE = 8192
# torchtitan's selective recomputation repeats every second product of a layer
SELECTIVE, FULL = 0.5, 1.0
# async TP computes while it sends: half of the messages are hidden
ASYNC_TP = 0.5


@dataclass(frozen=True)
class Published:
    """A step of Llama 3.1 in bf16 with sequences of 8,192 tokens, on H100 GPUs in nodes of 8.

    From benchmarks/llama3_h100_202412_torchtitan.md (without tp) and asyncTP_llama3_h100_2025-06_torchtitan.md (with tp
    and sequence parallelism) in torchtitan's repository.
    """

    model: str
    num_gpus: int
    tokens_per_second: float  # and per GPU
    sequences: int  # of a data-parallel rank in a step, in one micro-batch
    recomputed: float
    recompute: Literal["selective", "full"]
    tp: int = 1
    compiled: Compiled = "layers"
    exposed_tp: float = 1.0

    def __str__(self) -> str:
        return f"{self.model}-on-{self.num_gpus}-{self.compiled}-{self.tokens_per_second}"


EIGHT, SEVENTY = "Llama-3-8B", "Llama-3-70B"
STEPS = [
    Published(EIGHT, 8, 6667, 2, SELECTIVE, "selective"),
    Published(EIGHT, 8, 5762, 2, SELECTIVE, "selective", compiled="nothing"),
    Published(EIGHT, 128, 6514, 2, SELECTIVE, "selective"),
    Published(EIGHT, 128, 5605, 2, SELECTIVE, "selective", compiled="nothing"),
    Published(EIGHT, 64, 4378, 12, SELECTIVE, "selective", tp=8),
    Published(EIGHT, 64, 4809, 12, SELECTIVE, "selective", tp=8, exposed_tp=ASYNC_TP),
    Published(SEVENTY, 256, 597, 16, FULL, "full", tp=8),
    Published(SEVENTY, 256, 652, 16, FULL, "full", tp=8, exposed_tp=ASYNC_TP),
]


@cache
def size_of(model: str) -> ModelSize:
    from accelerate import init_empty_weights

    with init_empty_weights():
        return ModelSize.of(AutoModelForCausalLM.from_config(config_of(model)))


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_published_step_is_predicted_within_15_percent(step: Published):
    settings = FSDP2Settings(tp_size=step.tp, sequence_parallel=step.tp > 1)
    training = TrainingArgs(gradient_checkpointing=step.recompute)
    process = Process(size_of(step.model), axis_sizes(settings, step.num_gpus), settings, training, 4, 2, True)
    tokens = step.sequences * SEQUENCE
    rows = Rows(tokens, tokens, tokens * (SEQUENCE + 1) // 2, tokens)

    time = step_time(
        process,
        Cluster(GPUS["h100"], 8, step.num_gpus),
        rows,
        1,
        step.compiled,
        flops=step_flops(process, rows, step.recomputed),
        exposed_tp=step.exposed_tp,
    )

    predicted = tokens / step.tp / time.total
    print(f"{step}: {predicted:,.0f} tokens per second, {predicted / step.tokens_per_second - 1:+.1%}, {time}")
    assert predicted == pytest.approx(step.tokens_per_second, rel=0.15)


ON_8, ON_64, ON_1024 = (
    PlannedRun(model, num_gpus, pairs, is_lora=False)
    for model, num_gpus, pairs in ((EIGHT, 8, 64), (SEVENTY, 64, 256), (SEVENTY, 1024, 1024))
)
SPLIT = {"sequence_parallel": True, "zero_stage": 1}


@pytest.mark.parametrize(
    ("run", "strategy", "training", "least", "most"),
    [
        (ON_8, {"zero_stage": 2}, {"max_tokens_per_micro_batch": 8192}, 0.34, 0.40),
        (ON_64, {"pp_size": 4, "tp_size": 4, **SPLIT}, {"max_tokens_per_micro_batch": 4096}, 0.28, 0.37),
        (
            ON_1024,
            {"tp_size": 8, **SPLIT},
            {"max_tokens_per_micro_batch": 32768, "gradient_checkpointing": "selective"},
            0.25,
            0.32,
        ),
    ],
    ids=str,
)
def test_the_expected_mfu_is_near_what_others_reach(
    run: PlannedRun, strategy: dict[str, Any], training: dict[str, Any], least: float, most: float, tmp_path
):
    """torchtitan and Megatron-LM publish 0.29 to 0.42 for models of these sizes on H100 GPUs."""
    estimate = estimate_of(run, tmp_path).but(strategy=strategy, training=training)
    slowest = max(estimate.stages, key=lambda stage: stage.time.total).time
    print(f"{run}, {estimate.compiled} compiled: MFU {estimate.mfu:.3f}, {slowest.total:.2f} s, {slowest}")
    assert estimate.fits
    assert least <= estimate.mfu <= most
