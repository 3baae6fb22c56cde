"""Complete runs on Ray: the reference modes, resuming, and the errors of failed workers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compared_runs import merge, metric_log
from tests.support.logged import logged
from tests.support.processes import descendants
from tests.support.small_runs import assert_same_run, mode_of, open_small_inputs, stored
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.pipeline import DPOPipeline
from thresher.training.loop import fit

pytestmark = pytest.mark.distributed

TWO = {"runtime": "ray", "actor_train": {"num_workers": 2}}


def run(values: dict[str, Any], output: Path, console: Any = None) -> list[str]:
    """Run a config; return the logged messages."""
    config = parse_config({**values, "output_dir": str(output)})
    with logged() as records:
        DPOPipeline(config, console=console).run()
    return [record.getMessage() for record in records]


def has_line(lines: list[str], start: str) -> bool:
    return any(line.startswith(start) for line in lines)


class FreeCores:
    """A tracker that records the maximum number of unreserved cores during training."""

    name = "console"

    def __init__(self) -> None:
        self.max_free = 0.0

    def start(self, run: object, resume_step: int | None) -> None:
        pass

    def log(self, step: int, metrics: object) -> None:  # noqa: ARG002
        import ray

        deadline = time.monotonic() + 10  # Ray releases resources with a delay
        while self.max_free < 6 and time.monotonic() < deadline:
            self.max_free = max(self.max_free, ray.available_resources()["CPU"])
            time.sleep(0.1)

    def close(self, status: str) -> None:
        pass


@pytest.fixture(scope="module")
def local(base, tmp_path_factory) -> Path:
    """The run in one process, which scores the reference on demand."""
    output = tmp_path_factory.mktemp("local")
    run(merge(base, {"reference": {"mode": "concurrent", "infer_batch_size": 8}}), output)
    return output


@pytest.fixture(scope="module")
def on_two(base, ray_here, tmp_path_factory) -> tuple[Path, list[str], FreeCores]:
    """The run on two workers, with the reference precomputed by two more."""
    output, free = tmp_path_factory.mktemp("two"), FreeCores()
    reference = {"num_workers": 2, "mode": "precompute", "cache_dir": str(output / "cache")}
    changes = {"reference": reference, "track_with": ["console"]}
    with contextlib.chdir(output.parent):  # relative paths mean the same in workers
        return output, run(merge(merge(base, TWO), changes), Path(output.name), free), free


def test_a_precomputed_reference_equals_a_plain_forward(local, on_two):
    output, lines, _ = on_two
    assert_same_run(output, local)
    assert "device      2 x cpu on 1 node" in lines
    assert has_line(lines, "reference: 0 pairs from the cache, 24 scored by its workers; the cache is ")


def test_reference_workers_are_released_after_precomputing(on_two):
    assert on_two[2].max_free == 6  # of 8; each of the two policy workers reserves one


@pytest.mark.hand  # CI has these axes in tests/engines, and a separate reference
@pytest.mark.parametrize("mode", ["precompute", "concurrent"])
def test_by_default_the_reference_runs_in_the_policys_workers_on_their_axes(base, ray_here, tmp_path, mode):
    """With tp, another number of workers would round differently: margins would not start at 0."""
    tp = {
        "num_workers": 2,
        "model_args": {"dtype": "bf16"},
        "strategy_args": {"strategy_config": {"tp_size": 2}},
    }
    reference = {"mode": mode, "model_args": {"model_name_or_path": base["pretrain"]}}
    values = merge(base, {"max_steps": 1, "runtime": "ray", "actor_train": tp, "reference": reference})
    values["reference"].pop("infer_batch_size")
    values |= {"validation": None, "eval_steps": 0}
    lines = run(
        merge(values, {"reference": {"cache_dir": str(tmp_path / "cache")}} if mode == "precompute" else {}), tmp_path
    )
    if mode == "precompute":
        assert has_line(lines, "reference: 0 pairs from the cache, 6 scored by the policy's workers; the cache is ")
    first = metric_log(tmp_path)[0]
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
    assert first["rewards/accuracies"] == 0.5


def test_resuming_on_two_workers_is_bitwise(base, ray_here, tmp_path):
    """With dropout, each rank must restore its random state."""
    lora = {"model_args": {"lora_rank": 4, "lora_dropout": 0.3}, "training_args": {"learning_rate": 0.05}}
    values = merge(merge(base, TWO), {"actor_train": lora})
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    assert has_line(run(values, uninterrupted), "reference: 0 pairs from the cache, 24 scored by its workers")
    shutil.copytree(uninterrupted / "checkpoints" / "step-00000002", resumed / "checkpoints" / "step-00000002")
    lines = run({**values, "resume_from_checkpoint": "auto"}, resumed)
    assert f"resuming from {resumed / 'checkpoints' / 'step-00000002'}" in lines
    assert has_line(lines, "reference: 24 pairs from the cache, 0 scored by its workers")

    assert metric_log(resumed) == [record for record in metric_log(uninterrupted) if record["step"] > 2]
    last = "checkpoints/step-00000004"
    for name in ("weights", "optimizer", "rng"):
        ours, theirs = (stored(output / last, name) for output in (resumed, uninterrupted))
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            assert torch.equal(ours[key], tensor), f"{name}: {key}"
    streams = stored(uninterrupted / last, "rng")
    assert not torch.equal(streams["torch"], streams["rank.1.torch"])


def test_a_run_resumes_with_fewer_workers_and_reports_unused_random_states(base, local, on_two, tmp_path):
    source, output = on_two[0], tmp_path / "out"
    shutil.copytree(source / "checkpoints" / "step-00000002", output / "checkpoints" / "step-00000002")
    lines = run({**base, "resume_from_checkpoint": "auto"}, output)
    assert "the checkpoint has the RNG state of 2 ranks, and this run has 1: the rest is not used" in lines
    ours = metric_log(output)
    theirs = [record for record in metric_log(local) if record["step"] > 2]
    for mine, yours in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(yours, rel=1e-5, abs=1e-5)


@pytest.fixture
def prefetching(base, ray_here, tmp_path):
    """A run on two workers that is ready to begin, with one reference worker that prefetches two steps."""
    from thresher.runtime.ray.runtime import open_ray_runtime

    changes = {"reference": {"mode": "concurrent", "infer_batch_size": 8}, "output_dir": str(tmp_path / "out")}
    # many micro-batches, so that training a step takes longer than scoring it
    long_steps = {"actor_train": {"training_args": {"global_batch_size": 20, "max_tokens_per_micro_batch": 16}}}
    config, inputs = open_small_inputs(merge(merge(merge(base, TWO), changes), long_steps))
    assert mode_of(config) == "concurrent"
    with open_ray_runtime(config, inputs.mode) as runtime:
        runtime.start(inputs, None, print)
        yield config, inputs, runtime


@pytest.mark.hand  # CI has the values of a concurrent reference
def test_the_reference_is_scored_during_training_and_at_most_prefetch_steps_ahead(prefetching, tmp_path):
    from thresher.observability.trackers.jsonl import StepLog

    config, inputs, runtime = prefetching
    runtime.begin()
    log: list[tuple[int, dict]] = []

    class Log:
        def log(self, step: int, metrics: dict) -> None:
            log.append((step, metrics))

    fit(runtime, config, inputs.plan, Log(), StepLog(tmp_path / "skipped_steps.jsonl", resume_step=None))
    assert all(metrics["time/wait_reference"] >= 0 for _, metrics in log if "loss" in metrics)
    scored = [span for worker in runtime.scorers.call("trace") for span in worker]
    trained = runtime.ranks.call("trace")
    assert sorted({span.step for span in scored}) == [0, 1, 2, 3]
    for rank in trained:
        assert [span.step for span in rank] == [0, 1, 2, 3]
    # back-pressure: a step is submitted when the step prefetch_steps before it starts, not earlier
    first = trained[0]
    for span in scored:
        if span.step > config.reference.prefetch_steps:
            assert span.start > first[span.step - config.reference.prefetch_steps - 1].start - 1e-3
    # overlap: a later step is scored while an earlier one is trained
    assert any(
        score.step > train.step and score.start < train.stop and train.start < score.stop
        for score in scored
        for train in first
    )


@pytest.mark.hand  # CI has the names in tests/runtime/test_worker_deaths.py
def test_an_error_names_the_worker_that_died(prefetching):
    _, inputs, runtime = prefetching
    import ray

    from thresher.runtime.ray.cluster import wait_for

    runtime.begin()
    records = runtime.run(inputs.plan.num_steps)
    next(records)
    ray.kill(runtime.ranks.workers[1])
    with pytest.raises(UserError, match=r"(?s)actor_train worker 1 of 2 died: \w.*\n.*resume from the newest"):
        list(records)
    with pytest.raises(UserError, match="actor_train worker 0 of 2 died"):
        wait_for(runtime.ranks.submit("evaluate")[:1])  # all workers were killed


def unloadable(*roles: str) -> dict[str, Any]:
    """A config error that only the workers detect: kernels that are not installed."""
    return {role: {"model_args": {"attn_implementation": "flash_attention_2"}} for role in roles}


def test_a_user_error_in_a_worker_is_raised_unchanged(base, ray_here, tmp_path):
    with pytest.raises(UserError) as caught:
        run(merge(merge(base, TWO), unloadable("reference")), tmp_path / "out")
    message = str(caught.value)
    assert "ray::" not in message
    assert "Traceback" not in message
    assert message.startswith(f"cannot load the model from {base['reference']['model_args']['model_name_or_path']}: ")


def test_a_policy_that_cannot_be_loaded_fails_before_the_reference_starts(base, ray_here, tmp_path):
    """Neither can be loaded. The policy workers start first, and the error does not wait for reference workers."""
    with pytest.raises(UserError, match=f"cannot load the model from {re.escape(base['pretrain'])}: "):
        run(merge(merge(base, TWO), unloadable("actor_train", "reference")), tmp_path / "out")


def test_a_local_cluster_listens_on_loopback_only_and_requires_a_token(ray_here):
    assert os.environ["RAY_AUTH_MODE"] == "token"
    sockets = {socket for pid in descendants(os.getpid()) for socket in sockets_of(pid)}
    addresses = {address for socket, address in listeners().items() if socket in sockets}
    assert addresses  # of Ray's servers
    assert addresses <= {"0100007F", LOOPBACK_V6, LOOPBACK_V4_IN_V6}


LOOPBACK_V6 = "00000000000000000000000001000000"
LOOPBACK_V4_IN_V6 = "0000000000000000FFFF00000100007F"


def sockets_of(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.add(str(link.readlink()))
    return found


def listeners() -> dict[str, str]:
    """Addresses of all listening sockets of this machine, by socket."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]": row[1].partition(":")[0] for row in rows if row[3] == "0A"}
