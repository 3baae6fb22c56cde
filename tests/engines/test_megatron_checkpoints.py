"""Checkpoints of Megatron-Core: bitwise on the same axes, and exchanged with other axes and the native engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.test_sharded_checkpoints import assert_same_bits
from tests.support.engines import parity
from tests.support.engines.agreement import assert_same_weights
from tests.support.engines.saved_runs import NUM_STEPS, SAVED_STEP, Result, Run, loss_scales_of_a_resume, train
from thresher.builders.export import export_checkpoint
from thresher.checkpoint.manifest import verify
from thresher.checkpoint.tensor_files import load_tensors
from thresher.distributed.mesh import ParallelDims
from thresher.models.loading.adapters import LoraSettings
from thresher.models.loading.trained import TrainedParts

pytest.importorskip("megatron.core", reason="the extra megatron is not installed")

from tests.support.engines.megatron_engine import MegatronEngine, load_and_write, load_other_model, saved_dtypes

pytestmark = pytest.mark.distributed
ENGINE = "megatron"
STEP, LAST = f"step-{SAVED_STEP:08d}", f"step-{NUM_STEPS:08d}"
TOLERANCE = 1e-5
DP, TP, PP = (ParallelDims(**{axis: 2}) for axis in ("dp_replicate", "tp", "pp"))
DP_TP, TP_PP = ParallelDims(dp_replicate=2, tp=2), ParallelDims(tp=2, pp=2)
ADAPTER = TrainedParts(lora=LoraSettings(4, None, ["all-linear"]))


@dataclass(frozen=True)
class Setup:
    """What is saved on which axes."""

    sizes: ParallelDims
    family: str = "llama"
    settings: tuple[tuple[str, Any], ...] = ()
    trained: TrainedParts = field(default_factory=TrainedParts)

    def run(self, model: Path, root: Path, **rest: Any) -> Run:
        engine = MegatronEngine(self.sizes, self.settings)
        return Run(model, root, self.sizes, engine=engine, trained=self.trained, **rest)


SETUPS = {
    "distributed optimizer": Setup(DP),
    "dp": Setup(DP, settings=(("use_distributed_optimizer", False),)),
    "overlap": Setup(DP, settings=(("overlap_grad_reduce", True), ("overlap_param_gather", True))),
    "dp x tp": Setup(DP_TP, "qwen3"),
    "pp, tied": Setup(PP, "qwen2"),
    "tp x pp, sequence parallel": Setup(TP_PP, "qwen2", (("sequence_parallel", True),)),
    "ep": Setup(DP, "qwen3_moe", (("ep_size", 2),)),
    "tp, LoRA": Setup(TP, trained=ADAPTER),
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    saved: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in saved:
            saved[family] = parity.save_model(tmp_path_factory.mktemp(family), family, 0)
        return saved[family]

    return find


def run_all(pool_of, run: Run) -> list[Result]:
    return [train(run)] if run.sizes is None else pool_of(run.sizes.num_processes).run(train, run)


def native(run: Run, root: Path, **changes: Any) -> Run:
    """The same run in one process of the native engine."""
    return replace(run, root=root, sizes=None, engine=None, **changes)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_run_resumes_bitwise_and_native_loads_its_state(setup, pool_of, model_of, tmp_path):
    run = setup.run(model_of(setup.family), tmp_path / "run", saves_at=(SAVED_STEP, NUM_STEPS))
    whole = run_all(pool_of, run)
    verify(run.root / LAST)

    resumed = run_all(pool_of, replace(run, root=tmp_path / "resumed", start=run.root / STEP, saves_at=()))
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours.losses == theirs.losses[SAVED_STEP:]
        assert_same_bits(ours.weights, theirs.weights)
        assert_same_bits(ours.moments, theirs.moments)

    (loaded,) = run_all(pool_of, native(run, tmp_path / "native", start=run.root / LAST, saves_at=()))
    assert_same_bits(loaded.weights, whole[0].weights)
    assert_same_bits(loaded.moments, whole[0].moments)
    (continued,) = run_all(pool_of, native(run, tmp_path / "native", start=run.root / STEP, saves_at=()))
    assert continued.losses == pytest.approx(whole[0].losses[SAVED_STEP:], abs=TOLERANCE)


@pytest.mark.parametrize("name", ["dp x tp", "tp x pp, sequence parallel", "ep", "tp, LoRA"])
def test_megatron_loads_a_native_checkpoint(name, pool_of, model_of, tmp_path):
    setup = SETUPS[name]
    run = setup.run(model_of(setup.family), tmp_path / "run")
    start = native(run, tmp_path / "native", saves_at=(SAVED_STEP, NUM_STEPS))
    (saved,) = run_all(pool_of, start)

    for loaded in run_all(pool_of, replace(run, start=start.root / LAST)):
        assert_same_bits(loaded.weights, saved.weights)
        assert_same_bits(loaded.moments, saved.moments)
    for continued in run_all(pool_of, replace(run, start=start.root / STEP)):
        assert continued.losses == pytest.approx(saved.losses[SAVED_STEP:], abs=TOLERANCE)
        assert_same_weights(continued.weights, saved.weights)


def test_experts_resume_from_megatron_natively_and_the_other_way_round(pool_of, model_of, tmp_path):
    run = SETUPS["ep"].run(model_of("qwen3_moe"), tmp_path / "run", saves_at=(SAVED_STEP, NUM_STEPS))
    split = replace(run, root=tmp_path / "native", sizes=ParallelDims(dp_shard=2, ep=2), engine=None)
    of_megatron, of_native = (run_all(pool_of, each) for each in (run, split))
    for start, saved, other in ((run, of_megatron, split), (split, of_native, run)):
        for loaded in run_all(pool_of, replace(other, start=start.root / LAST, saves_at=())):
            assert_same_bits(loaded.weights, saved[0].weights)
            assert_same_bits(loaded.moments, saved[0].moments)
        for continued in run_all(pool_of, replace(other, start=start.root / STEP, saves_at=())):
            assert continued.losses == pytest.approx(saved[0].losses[SAVED_STEP:], abs=TOLERANCE)


def test_other_axes_write_the_tensors_that_they_load(pool_of, model_of, tmp_path):
    run = Setup(DP).run(model_of("qwen2"), tmp_path / "dp", until=SAVED_STEP, saves_at=(SAVED_STEP,))
    run_all(pool_of, run)
    for sizes in (TP, TP_PP):
        target = tmp_path / f"on {sizes.num_processes} ranks"
        target.mkdir()
        case = parity.Case(sizes, engine=MegatronEngine(sizes))
        pool_of(sizes.num_processes).run(load_and_write, case, run.model, run.root / STEP, target)
        for stem in ("weights", "optimizer"):
            assert_same_bits(load_tensors(target, stem), load_tensors(run.root / STEP, stem))


def test_a_checkpoint_exports_to_a_transformers_model(pool_of, model_of, tmp_path):
    run = Setup(TP_PP, "qwen2").run(
        model_of("qwen2"), tmp_path / "run", until=1, saves_at=(1,), config=export_config(model_of("qwen2"))
    )
    result = run_all(pool_of, run)[0]
    export_checkpoint(run.root / "step-00000001", tmp_path / "exported", dtype="fp32")
    exported = load_tensors(tmp_path / "exported", "model")
    assert_same_bits({name: exported[name] for name in result.weights}, result.weights)


def export_config(model: Path) -> dict[str, Any]:
    args = {"model_name_or_path": str(model), "dtype": "fp32", "master_dtype": "fp32"}
    return {"actor_train": {"model_args": args}, "pretrain": str(model)}


@pytest.mark.parametrize("sizes", [DP, TP], ids=["distributed_optimizer", "tp"])
def test_checkpoints_of_bf16_have_the_fp32_weights_of_the_files(sizes, pool_of, model_of):
    engine = MegatronEngine(sizes)
    case = parity.Case(sizes, dtype=torch.bfloat16, engine=engine)
    expected = load_tensors(model_of("llama"), "model")
    for dtypes, weights in pool_of(2).run(saved_dtypes, case, model_of("llama")):
        assert dtypes == {"F32"}
        assert_same_bits(weights, {name: expected[name] for name in weights})


def test_a_run_in_fp16_resumes_with_its_loss_scale(pool_of, model_of, tmp_path):
    engine = MegatronEngine(TP)
    case = parity.Case(TP, loss="simpo", dtype=torch.float16, initial_loss_scale=2.0**12, engine=engine)
    for saved, before, after in pool_of(2).run(loss_scales_of_a_resume, case, model_of("llama"), tmp_path):
        assert before == {"value": 2.0**16, "steps": 0}
        assert saved == after == {"value": 2.0**12, "steps": 1}


def test_a_checkpoint_of_another_model_is_rejected(pool_of, model_of, tmp_path):
    run = Setup(TP).run(model_of("llama"), tmp_path / "run", until=1, saves_at=(1,))
    run_all(pool_of, run)
    case = parity.Case(TP, family="qwen2", engine=MegatronEngine(TP))
    for message, is_same in pool_of(2).run(load_other_model, case, model_of("qwen2"), run.root / "step-00000001"):
        assert "was made for a different model" in message
        assert is_same
