"""Estimated MFU of full training on H100 GPUs, with the settings of docs/guides/gpu.md."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.planned_runs import PlannedRun, config_without_axes
from thresher.plan.compute import Cluster
from thresher.plan.estimate import Estimate
from thresher.plan.hardware import GPUS
from thresher.plan.search import with_settings

ON_8, ON_64, ON_1024 = (
    PlannedRun(model, num_gpus, pairs, is_lora=False)
    for model, num_gpus, pairs in (("Llama-3-8B", 8, 64), ("Llama-3-70B", 64, 256), ("Llama-3-70B", 1024, 1024))
)


@pytest.mark.parametrize(
    ("run", "axes", "training", "least"),
    [
        (ON_8, {"zero_stage": 2}, {"max_tokens_per_micro_batch": 8192}, 0.50),
        (
            ON_64,
            {"pp_size": 4, "tp_size": 4, "sequence_parallel": True, "zero_stage": 1},
            {"max_tokens_per_micro_batch": 4096},
            0.45,
        ),
        (
            ON_1024,
            {"tp_size": 8, "sequence_parallel": True, "zero_stage": 1},
            {"max_tokens_per_micro_batch": 32768, "gradient_checkpointing": "selective"},
            0.40,
        ),
    ],
    ids=str,
)
def test_the_best_case_of_the_roofline_reaches_its_target(
    run: PlannedRun, axes: dict[str, Any], training: dict[str, Any], least: float, tmp_path
):
    plain = Estimate(config_without_axes(run, tmp_path), Cluster(GPUS["h100"], 8, run.num_gpus))
    estimate = with_settings(plain, strategy=axes, training=training)
    slowest = max(estimate.stages, key=lambda stage: stage.roofline.best).roofline
    print(f"{run}, {estimate.compiled} compiled: MFU {estimate.mfu}, {slowest}")
    assert estimate.fits
    assert estimate.mfu[1] >= least
