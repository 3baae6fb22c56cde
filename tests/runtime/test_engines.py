"""Runs on Ray with DeepSpeed and Megatron-Core agree with runs on the native strategy, and so do their checkpoints."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compared_runs import merge, metric_log
from tests.support.logged import logged
from tests.support.small_runs import assert_same_run, last_weights, make_base
from tests.support.worker_killer import Killer
from thresher.config import parse_config
from thresher.pipeline import DPOPipeline

pytestmark = pytest.mark.distributed
pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
pytest.importorskip("megatron.core", reason="needs the extra megatron")

NATIVE = {"strategy_name": "fsdp2_train"}
# the policy's strategy, and that of the reference
ENGINES = {
    "deepspeed": (
        {"strategy_name": "deepspeed_train", "strategy_config": {"zero_stage": 3}},
        {"strategy_name": "deepspeed_infer", "strategy_config": {"zero_stage": 3}},
    ),
    "megatron": (
        {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 2}},
        {"strategy_name": "fsdp2_infer"},
    ),
}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("inputs")
    two = {"num_workers": 2, "mode": "precompute", "cache_dir": str(directory / "cache")}
    run = {"runtime": "ray", "async_save": False, "track_with": ["console"], "actor_train": {"num_workers": 2}}
    return merge(make_base(directory), {**run, "reference": two})


def train(values: dict[str, Any], output: Path, engine: str | None = None, console: Any = None, **changes: Any) -> str:
    """Run a config on an engine; return what it logged."""
    if engine is not None:
        policy, reference = ENGINES[engine]
        values = merge(values, {"actor_train": {"strategy_args": policy}, "reference": {"strategy_args": reference}})
    with logged() as records:
        DPOPipeline(parse_config({**merge(values, changes), "output_dir": str(output)}), console=console).run()
    return "\n".join(record.getMessage() for record in records)


@pytest.fixture(scope="module")
def native(values, ray_for_megatron, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("native")
    text = train(values, output, reference={"cache_dir": str(output / "cache")})
    assert "reference: 0 pairs from the cache, 24 scored" in text
    return output


@pytest.fixture(scope="module", params=ENGINES)
def on_engine(request, values, ray_for_megatron, tmp_path_factory) -> tuple[str, Path, str]:
    """A run with both roles on an engine, the cache of its own reference, and what it logged."""
    output = tmp_path_factory.mktemp(request.param)
    text = train(values, output, request.param, reference={"cache_dir": str(output / "cache")})
    return request.param, output, text


@pytest.mark.hand  # CI has the same without Ray in tests/engines
def test_a_run_agrees_with_the_native_strategy(on_engine, native):
    _, output, text = on_engine
    assert "reference: 0 pairs from the cache, 24 scored" in text
    assert_same_run(output, native)


@pytest.mark.hand  # CI has the key of the cache
def test_the_cache_of_one_engine_serves_the_others(on_engine, values, tmp_path):
    engine, output, _ = on_engine
    one = {"max_steps": 1, "eval_steps": 0, "runtime": "auto", "actor_train": {"num_workers": None}}
    own = {"num_workers": None, "cache_dir": str(output / "cache")}
    text = train(values, tmp_path / "run", **merge(one, {"reference": own}))
    assert re.search(r"reference: [1-9]\d* pairs from the cache, 0 scored", text), engine


@pytest.mark.hand  # CI has the same with the native strategy
def test_a_killed_worker_does_not_change_the_results(on_engine, values, tmp_path):
    engine, output, _ = on_engine
    killer = Killer(3, "ActorWorker")  # after the checkpoint of step 2
    own = {"reference": {"cache_dir": str(output / "cache")}}
    train(values, tmp_path / "killed", engine, killer, **own)
    assert killer.killed
    assert metric_log(tmp_path / "killed") == metric_log(output)
    ours, theirs = last_weights(tmp_path / "killed"), last_weights(output)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def resume(checkpoint_of: Path, values: dict[str, Any], output: Path, cache: Path, engine: str | None) -> None:
    """Continue a run from its checkpoint of step 2 on another engine."""
    shutil.copytree(checkpoint_of / "checkpoints", output / "checkpoints")
    shutil.copytree(checkpoint_of / "logs", output / "logs")
    newest = max((output / "checkpoints").iterdir())
    shutil.rmtree(newest)
    text = train(values, output, engine, resume_from_checkpoint="auto", reference={"cache_dir": str(cache / "cache")})
    assert "changed since the checkpoint: actor_train.strategy_args.strategy_name" in text


@pytest.mark.hand  # CI has the same without Ray in tests/engines
@pytest.mark.parametrize("direction", ["from native", "to native"])
def test_a_checkpoint_moves_between_engines(on_engine, native, values, tmp_path, direction):
    engine, output, _ = on_engine
    if direction == "from native":
        resume(native, values, tmp_path / "run", output, engine)
    else:
        resume(output, values, tmp_path / "run", native, None)
    assert_same_run(tmp_path / "run", native)
