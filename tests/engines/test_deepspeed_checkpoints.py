"""Checkpoints of DeepSpeed have the files of every engine: any stage and the native engine resume from them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.engines.test_sharded_checkpoints import assert_same_bits
from tests.support.engines import parity
from tests.support.engines.saved_runs import NUM_STEPS, SAVED_STEP, Result, Run, loss_scales_of_a_resume, train
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manifest import verify
from thresher.checkpoint.tensor_files import load_tensors
from thresher.distributed.mesh import ParallelDims
from thresher.models.loading.adapters import LoraSettings
from thresher.models.loading.trained import TrainedParts

pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")

from tests.support.engines.deepspeed_engine import Zero
from tests.support.engines.deepspeed_runs import load_error, step_and_undo

pytestmark = pytest.mark.distributed
ENGINE = "deepspeed"
TWO_RANKS = ParallelDims(dp_shard=2)
STEP, LAST = f"step-{SAVED_STEP:08d}", f"step-{NUM_STEPS:08d}"
TOLERANCE = 1e-5
ENGINES = {
    "zero 0": Zero(0),
    "zero 1": Zero(1),
    "zero 2 offload": Zero(2, offloads_optimizer=True),
    "zero 3": Zero(3, persists=100),
    "zero 3 offload": Zero(3, offloads_optimizer=True, offloads_param=True),
}


def run_all(pool_of, run: Run) -> list[Result]:
    return [train(run)] if run.sizes is None else pool_of(2).run(train, run)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return parity.save_model(tmp_path_factory.mktemp("model"), "llama", 0)


@pytest.fixture(scope="module")
def saved(pool_of, model, tmp_path_factory):
    """An uninterrupted run per engine that saves in the middle and at the end."""
    runs: dict[str, tuple[Run, list[Result]]] = {}

    def find(name: str) -> tuple[Run, list[Result]]:
        if name not in runs:
            root, engine = tmp_path_factory.mktemp("saved"), ENGINES.get(name)
            run = Run(model, root, TWO_RANKS, engine, saves_at=(SAVED_STEP, NUM_STEPS))
            runs[name] = run, run_all(pool_of, run)
        return runs[name]

    return find


@pytest.mark.parametrize("name", ENGINES)
def test_the_same_stage_resumes_bitwise(name, saved, pool_of, tmp_path):
    run, uninterrupted = saved(name)
    again = replace(run, root=tmp_path, start=run.root / STEP, saves_at=(NUM_STEPS,))
    for resumed, straight in zip(run_all(pool_of, again), uninterrupted, strict=True):
        assert resumed.losses == straight.losses[SAVED_STEP:]
        assert_same_bits(resumed.weights, straight.weights)
        assert_same_bits(resumed.moments, straight.moments)
    assert verify(tmp_path / LAST).files == verify(run.root / LAST).files


@pytest.mark.covered
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("native", "zero 0"),
        ("native", "zero 1"),
        ("native", "zero 2 offload"),
        ("native", "zero 3"),
        ("zero 0", "native"),
        ("zero 1", "native"),
        ("zero 2 offload", "zero 3"),
        ("zero 3", "native"),
        ("zero 3", "zero 1"),
        ("zero 3 offload", "zero 0"),
    ],
)
def test_another_engine_loads_bitwise_the_same_state_and_continues(writer, reader, saved, pool_of, tmp_path):
    run, uninterrupted = saved(writer)
    other = replace(run, engine=ENGINES.get(reader), root=tmp_path, saves_at=())
    for loaded, last in zip(run_all(pool_of, replace(other, start=run.root / LAST)), uninterrupted, strict=True):
        assert_same_bits(loaded.weights, last.weights)
        assert_same_bits(loaded.moments, last.moments)
    for resumed in run_all(pool_of, replace(other, start=run.root / STEP)):
        assert resumed.losses == pytest.approx(uninterrupted[0].losses[SAVED_STEP:], abs=TOLERANCE)


def test_one_process_reads_what_ranks_wrote(saved, pool_of, tmp_path):
    run, uninterrupted = saved("zero 3")
    assert_same_bits(load_tensors(run.root / LAST, "weights"), uninterrupted[0].weights)
    assert_same_bits(load_tensors(run.root / LAST, "optimizer"), uninterrupted[0].moments)
    (resumed,) = run_all(pool_of, Run(run.model, tmp_path, start=run.root / STEP))
    assert resumed.losses == pytest.approx(uninterrupted[0].losses[SAVED_STEP:], abs=TOLERANCE)


@pytest.mark.parametrize("name", ["zero 1", "zero 3"])
def test_every_rank_writes_half_of_the_elements(name, saved):
    run, uninterrupted = saved(name)
    total = sum(weight.numel() for weight in uninterrupted[0].weights.values())
    for stem, copies in (("weights", 1), ("optimizer", 2)):
        for rank in (1, 2):
            with safe_open(run.root / LAST / f"{stem}-{rank:05d}-of-00002.safetensors", framework="pt") as file:
                written = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
            assert written == pytest.approx(copies * total / 2, rel=0.01)


def test_the_state_that_is_not_tensors_is_that_of_the_native_engine(saved):
    ours, theirs = (load_json(saved(name)[0].root / STEP / "optimizer.json") for name in ("zero 3", "native"))
    assert ours == theirs


@pytest.mark.parametrize("reader", ["zero 3", "native"])
def test_adapters_under_zero_3_are_saved_whole(reader, model, pool_of, tmp_path):
    lora = TrainedParts(lora=LoraSettings(4, None, ["q_proj", "down_proj"]))
    run = Run(model, tmp_path / "a", TWO_RANKS, ENGINES["zero 3"], saves_at=(SAVED_STEP,), trained=lora)
    uninterrupted = run_all(pool_of, run)
    stored = load_tensors(run.root / STEP, "weights")
    assert len(stored) == 16
    assert all(tensor.numel() and tensor.abs().max() > 0 for tensor in stored.values())

    again = replace(run, engine=ENGINES.get(reader), root=tmp_path / "b", start=run.root / STEP, saves_at=())
    for resumed in run_all(pool_of, again):
        assert resumed.losses == pytest.approx(uninterrupted[0].losses[SAVED_STEP:], abs=TOLERANCE)
        if reader == "zero 3":
            assert resumed.losses == uninterrupted[0].losses[SAVED_STEP:]
            assert_same_bits(resumed.weights, uninterrupted[0].weights)


@pytest.mark.parametrize("name", ["zero 0", "zero 1", "zero 3"])
def test_a_checkpoint_before_the_first_step_has_no_moments(name, pool_of, model, tmp_path):
    run = Run(model, tmp_path, TWO_RANKS, ENGINES[name], until=1)
    for loss, loss_after_load in pool_of(2).run(step_and_undo, run):
        assert loss == loss_after_load
    assert load_tensors(tmp_path, "optimizer") == {}


def test_a_run_in_fp16_resumes_with_its_loss_scale(pool_of, model, tmp_path):
    engine = ENGINES["zero 1"]
    case = parity.Case(TWO_RANKS, loss="simpo", dtype=torch.float16, initial_loss_scale=2.0**12, engine=engine)
    for saved, before, after in pool_of(2).run(loss_scales_of_a_resume, case, model, tmp_path):
        assert before == {"value": 2.0**16, "steps": 0}
        assert saved == after == {"value": 2.0**12, "steps": 1}


def test_moments_with_different_step_counts_are_rejected(saved, pool_of, model, tmp_path):
    """DeepSpeed has one count for a whole partition; torch counts per parameter."""
    copy = shutil.copytree(saved("zero 0")[0].root / STEP, tmp_path / STEP)
    moments = load_tensors(copy, "optimizer")
    moments["step/lm_head.weight"] += 1
    save_file(moments, copy / "optimizer.safetensors")
    for error in pool_of(2).run(load_error, Run(model, tmp_path, TWO_RANKS, ENGINES["zero 3"]), copy):
        assert "updated some parameters more often than others" in error
        assert "fsdp2_train" in error
