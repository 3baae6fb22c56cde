"""Expected step times, against steps that torchtitan has published, and the MFU of docs/internals/plan-accuracy.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest
from transformers import AutoModelForCausalLM

from tests.support.planned_runs import PlannedRun, estimate_of
from tests.support.published_models import config_of
from thresher.builders.hardware import GPUS, Compiled
from thresher.builders.memory import ModelSize, Process
from thresher.config.roles import TrainingArgs
from thresher.engines.native.build import axis_sizes
from thresher.engines.native.declaration import FSDP2Settings
from thresher.plan.step import Cluster, Flops, step_flops, step_time
from thresher.plan.workload import Rows

SEQUENCE = 8192
# async TP computes while it sends: the time that it saved is 0.39 and 0.50 of the expected time of the messages of tp
ASYNC_TP = 0.55


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
    recompute: Literal["selective", "full"]
    tp: int = 1
    compiled: Compiled = "layers"
    exposed_tp: float = 1.0

    def __str__(self) -> str:
        return f"{self.model}-on-{self.num_gpus}-{self.compiled}-{self.tokens_per_second}"

    @property
    def tokens(self) -> int:
        """Of a data-parallel rank."""
        return self.sequences * SEQUENCE

    @property
    def rows(self) -> Rows:
        return Rows(self.tokens, self.tokens, self.tokens * (SEQUENCE + 1) // 2, self.tokens)

    @property
    def process(self) -> Process:
        settings = FSDP2Settings(tp_size=self.tp, sequence_parallel=self.tp > 1)
        training = TrainingArgs(gradient_checkpointing=self.recompute)
        return Process(size_of(self.model), axis_sizes(settings, self.num_gpus), settings, training, 4, 2, True)

    @property
    def flops(self) -> Flops:
        """FLOPs of a GPU. torchtitan keeps the logits, and computes parts of a layer again.

        Selective: every second of the products q, k, v, o, gate, up, down. Full: the attention, and all products but
        the last, whose result the backward does not need.
        """
        config = config_of(self.model)
        hidden, wide = config.hidden_size, config.intermediate_size
        keys = hidden // config.num_attention_heads * config.num_key_value_heads
        scores = 2 * self.rows.attended * hidden  # computed again by the kernel of the backward
        if self.recompute == "selective":
            layer = 2 * self.tokens * hidden * (keys + hidden + wide) + scores
        else:
            layer = 2 * self.tokens * hidden * 2 * (keys + hidden + wide) + 3 * scores
        return replace(step_flops(self.process, self.rows), recomputed=config.num_hidden_layers * layer / self.tp)

    def share_of_peak(self, flops: float) -> float:
        seconds = self.tokens / self.tp / self.tokens_per_second
        return flops / (GPUS["h100"].peak_flops * seconds)


EIGHT, SEVENTY = "Llama-3-8B", "Llama-3-70B"
STEPS = [
    Published(EIGHT, 8, 6667, 2, "selective"),
    Published(EIGHT, 8, 5762, 2, "selective", compiled="nothing"),
    Published(EIGHT, 128, 6514, 2, "selective"),
    Published(EIGHT, 128, 5605, 2, "selective", compiled="nothing"),
    Published(EIGHT, 64, 4378, 12, "selective", tp=8),
    Published(EIGHT, 64, 4809, 12, "selective", tp=8, exposed_tp=ASYNC_TP),
    Published(SEVENTY, 256, 597, 16, "full", tp=8),
    Published(SEVENTY, 256, 652, 16, "full", tp=8, exposed_tp=ASYNC_TP),
]


@cache
def size_of(model: str) -> ModelSize:
    from accelerate import init_empty_weights

    with init_empty_weights():
        return ModelSize.of(AutoModelForCausalLM.from_config(config_of(model)))


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_published_step_is_predicted_within_15_percent(step: Published):
    time = step_time(
        step.process,
        Cluster(GPUS["h100"], 8, step.num_gpus),
        step.rows,
        1,
        step.compiled,
        flops=step.flops,
        exposed_tp=step.exposed_tp,
    )

    predicted = step.tokens / step.tp / time.total
    print(f"{step}: {predicted:,.0f} tokens per second, {predicted / step.tokens_per_second - 1:+.1%}, {time}")
    assert predicted == pytest.approx(step.tokens_per_second, rel=0.15)


ON_8, ON_64, ON_1024 = (
    PlannedRun(model, num_gpus, pairs, is_lora=False)
    for model, num_gpus, pairs in ((EIGHT, 8, 64), (SEVENTY, 64, 256), (SEVENTY, 1024, 1024))
)
SPLIT = {"sequence_parallel": True, "zero_stage": 1}


@pytest.mark.parametrize(
    ("run", "strategy", "training", "published"),
    [
        (ON_8, {"zero_stage": 2}, {"max_tokens_per_micro_batch": 8192}, STEPS[0]),
        (ON_64, {"pp_size": 4, "tp_size": 4, **SPLIT}, {"max_tokens_per_micro_batch": 4096}, STEPS[6]),
        (
            ON_1024,
            {"tp_size": 8, **SPLIT},
            {"max_tokens_per_micro_batch": 32768, "gradient_checkpointing": "selective"},
            STEPS[6],
        ),
    ],
    ids=str,
)
def test_the_expected_mfu_is_that_of_a_published_step_with_less_recomputed(
    run: PlannedRun, strategy: dict[str, Any], training: dict[str, Any], published: Published, tmp_path
):
    """These runs recompute less than the published ones: at best, all FLOPs of the GPUs are FLOPs of the model."""
    estimate = estimate_of(run, tmp_path).but(strategy=strategy, training=training)
    slowest = max(estimate.stages, key=lambda stage: stage.time.total).time
    least, most = (published.share_of_peak(flops) for flops in (published.flops.model, published.flops.total))
    print(f"{run}, {estimate.compiled} compiled: MFU {estimate.mfu:.3f} in {least:.3f} to {most:.3f}, {slowest}")
    assert estimate.fits
    assert least <= estimate.mfu <= most


QWEN, DEEPSEEK = "Qwen3-30B-A3B", "DeepSeek-V3"


@pytest.mark.parametrize(
    ("run", "sizes", "least", "most"),
    [
        (PlannedRun(QWEN, 16, 64, is_lora=False), {}, 0.04, 0.05),
        (PlannedRun(QWEN, 16, 64, is_lora=False), {"ep_size": 8}, 0.17, 0.19),
        (PlannedRun(QWEN, 64, 256, is_lora=False), {}, 0.04, 0.05),
        (PlannedRun(QWEN, 64, 256, is_lora=False), {"ep_size": 8}, 0.19, 0.21),
        (PlannedRun(DEEPSEEK, 256, 512, is_lora=False), {}, 0.004, 0.006),
        (PlannedRun(DEEPSEEK, 256, 512, is_lora=False), {"ep_size": 64}, 0.08, 0.09),
    ],
    ids=str,
)
def test_the_expected_mfu_of_experts_is_that_of_the_docs(run, sizes, least, most, tmp_path):
    recomputing = ({"gradient_checkpointing": recompute} for recompute in ("selective", "full"))
    estimate = estimate_of(run, tmp_path)
    found = [estimate.but(strategy=sizes, training=training).with_chosen_budget() for training in recomputing]
    assert least <= max(each.mfu for each in found if each.fits or not any(other.fits for other in found)) <= most
