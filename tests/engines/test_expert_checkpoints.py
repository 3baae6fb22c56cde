"""Checkpoints do not depend on how experts are split: other sizes of ep, and Megatron-Core, resume from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.test_sharded_checkpoints import LAST, STEP, TOLERANCE, assert_same_bits, run_all
from tests.support.engines import parity
from tests.support.engines.saved_runs import NUM_STEPS, SAVED_STEP, Result, Run
from thresher.distributed.mesh import ParallelDims
from thresher.models.loading.adapters import LoraSettings
from thresher.models.loading.trained import TrainedParts

pytestmark = pytest.mark.distributed

TRAINED = {
    "all weights": TrainedParts(),
    "LoRA on experts": TrainedParts(lora=LoraSettings(4, None, ["all-linear", "experts.gate_up_proj"])),
}
OTHERS = {
    "1 process": None,
    "dp_shard 4": ParallelDims(dp_shard=4),
    "dp_shard 4, ep 4": ParallelDims(dp_shard=4, ep=4),
    "dp_shard 2, tp 2, ep 4": ParallelDims(dp_shard=2, tp=2, ep=4),
    "pp 2, cp 2, ep 2": ParallelDims(pp=2, cp=2, ep=2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return parity.save_model(tmp_path_factory.mktemp("model"), "qwen3_moe", 0, num_layers=2)


@pytest.fixture(scope="module", params=TRAINED.values(), ids=TRAINED)
def saved(request, pool_of, model, tmp_path_factory) -> tuple[Run, list[Result]]:
    """An uninterrupted run on four ranks that saves in the middle and at the end."""
    sizes = ParallelDims(dp_shard=4, ep=2)
    run = Run(model, tmp_path_factory.mktemp("run"), sizes, trained=request.param, saves_at=(SAVED_STEP, NUM_STEPS))
    return run, run_all(pool_of, run)


def test_the_same_sizes_resume_bitwise(saved, pool_of, tmp_path):
    run, uninterrupted = saved
    again = replace(run, root=tmp_path, start=run.root / STEP, saves_at=())
    for resumed, straight in zip(run_all(pool_of, again), uninterrupted, strict=True):
        assert resumed.losses == straight.losses[SAVED_STEP:]
        assert_same_bits(resumed.weights, straight.weights)
        assert_same_bits(resumed.moments, straight.moments)


@pytest.mark.parametrize("sizes", OTHERS.values(), ids=OTHERS)
def test_other_sizes_resume_within_rounding(saved, pool_of, tmp_path, sizes):
    run, uninterrupted = saved
    other = replace(run, root=tmp_path, sizes=sizes, start=run.root / STEP, saves_at=())
    for result in run_all(pool_of, other):
        assert result.losses == pytest.approx(uninterrupted[0].losses[SAVED_STEP:], abs=TOLERANCE)
    for result in run_all(pool_of, replace(other, start=run.root / LAST)):
        assert_same_bits(result.weights, {name: uninterrupted[0].weights[name] for name in result.weights})
        assert_same_bits(result.moments, {name: uninterrupted[0].moments[name] for name in result.moments})
