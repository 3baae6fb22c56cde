"""The log files of a run on Ray: one for the driver and one per worker, named by role and rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compared_runs import merge
from tests.support.logged import logged
from thresher.config import parse_config
from thresher.pipeline import DPOPipeline

pytestmark = pytest.mark.distributed

# every rank warns that a concurrent reference does not use the cache
ON_RAY = {
    "runtime": "ray",
    "actor_train": {"num_workers": 2},
    "reference": {"mode": "concurrent", "num_workers": 1, "cache_dir": "unused"},
}


def run(values: dict, output: Path) -> list[str]:
    with logged() as records:
        DPOPipeline(parse_config({**values, "output_dir": str(output)})).run()
    return [record.getMessage() for record in records]


@pytest.mark.hand  # CI has the environment of workers on Ray, and logs of one process
def test_each_worker_has_a_log_and_the_driver_logs_every_message_once(base, ray_here, tmp_path):
    values = merge(base, {**ON_RAY, "max_steps": 2})
    messages = run(values, tmp_path)
    logs = tmp_path / "logs"
    names = ["actor_train-0.log", "actor_train-1.log", "reference-0.log"]
    assert sorted(path.name for path in (logs / "workers").iterdir()) == names
    for rank in (0, 1):
        text = (logs / "workers" / f"actor_train-{rank}.log").read_text()
        assert f" INFO thresher.runtime.rank: worker {rank} of 2, process " in text
        assert " INFO thresher.runtime.rank: device: cpu\n" in text
        assert text.count("loaded the policy on cpu") == text.count("ready at step 0 of 2") == 1
    assert "loaded the reference on cpu" in (logs / "workers" / "reference-0.log").read_text()
    assert not any("loaded the" in line for line in messages)  # only in the logs of the workers
    note = "reference.cache_dir has no effect: the reference mode is concurrent"
    assert messages.count(note) == 1
    text = (logs / "run.log").read_text()
    assert text.count(f" WARNING thresher.pipeline: {note}") == 1
    assert messages[0] == "checking the config, its files and its models"  # before anything is written
    assert len(text.splitlines()) == len(messages) - 1

    run({**values, "max_steps": 3, "resume_from_checkpoint": "auto"}, tmp_path)
    assert (logs / "run.log").read_text().startswith(text)
    resumed = (logs / "workers" / "actor_train-1.log").read_text()
    assert resumed.count("worker 1 of 2") == 2  # appended
    assert "ready at step 2 of 3" in resumed


@pytest.mark.hand  # CI has the logs of a run on two workers
def test_worker_logs_that_cannot_be_written_are_reported_and_the_run_continues(base, ray_here, tmp_path):
    workers, target = tmp_path / "out" / "logs" / "workers", tmp_path / "target"
    workers.mkdir(parents=True)
    (workers / "actor_train-1.log").symlink_to(target)
    messages = run(merge(base, {**ON_RAY, "max_steps": 1}), tmp_path / "out")
    (warning,) = [line for line in messages if line.startswith("cannot write logs of actor_train workers on ")]
    assert str(workers / "actor_train-1.log") in warning
    assert (workers / "actor_train-0.log").is_file()
    assert not target.exists()


def test_system_envs_are_the_environment_of_the_workers(base, ray_here, tmp_path):
    """As the worker's process has it, not as the config does."""
    environment = {"system_envs": {"NCCL_DEBUG": "WARN"}, "actor_train": {"system_envs": {"THRESHER_TEST_ROLE": 7}}}
    values = merge(base, {"runtime": "ray", "max_steps": 1, "reference": {"mode": "none"}, "pref_loss": "simpo"})
    run(merge(values, environment), tmp_path)
    log = (tmp_path / "logs" / "workers" / "actor_train-0.log").read_text()
    (line,) = [line for line in log.splitlines() if "NCCL" in line]
    assert line.endswith("environment: NCCL_DEBUG=WARN, THRESHER_TEST_ROLE=7")
