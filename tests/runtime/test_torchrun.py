"""Runs whose processes torchrun or srun started: the numbers of Ray, resuming, failures and stops."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.support.cli_runner import exit_code_of
from tests.support.compared_runs import merge, metric_log
from tests.support.forks import python
from tests.support.paths import ROOT
from tests.support.ports import free_ports
from tests.support.processes import descendants
from tests.support.small_runs import last_weights
from thresher.config import parse_config
from thresher.pipeline import DPOPipeline

pytestmark = pytest.mark.distributed

THREADS = "4"  # of each of two workers in the Ray session of the tests
LAYOUTS = {"replicas": {"strategy_args": {"strategy_config": {"dp_replicate": 2}}}, "shards": {}}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SECONDS = 240


@pytest.fixture(scope="module")
def config(base, tmp_path_factory) -> dict[str, Any]:
    """Policy and reference are the same model: without its own workers, it runs on the policy's mesh."""
    return merge(base, {"reference": {"model_args": {"model_name_or_path": None}}})


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": THREADS, "HF_HUB_OFFLINE": "1"} | changes


def write(values: Mapping[str, Any], output: Path, changes: Mapping[str, Any] = {}) -> str:
    """Write the config of a run with its own reference cache; return its path."""
    path = output.with_suffix(".yaml")
    own = {"output_dir": str(output), "cache_dir": str(output) + "-cache"}
    path.write_text(yaml.safe_dump(merge(merge(values, own), changes)))
    return str(path)


def torchrun(*arguments: str, max_restarts: int = 0) -> subprocess.CompletedProcess[str]:
    ranks = ["--no-python", *python(), "-m", *arguments]
    command = [*python(), *TORCHRUN, f"--max-restarts={max_restarts}", *ranks]
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def start_tasks(
    *arguments: str, port: int | None = None, program: Sequence[str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start two processes with the variables that srun sets; torch's variables are not there."""
    port = port or free_ports()[0]
    step = {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [*(program or python()), "-m", *arguments],
            env=environment(**step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


def start(launcher: str, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start two ranks that can be stopped: not from the fork server."""
    if launcher == "srun":
        return start_tasks(*arguments, program=[sys.executable])
    command = [sys.executable, *TORCHRUN, "-m", *arguments]
    return [subprocess.Popen(command, env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True)]


def finish(tasks: Sequence[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Return the exit codes and what the tasks wrote on stderr."""
    try:
        shown = [task.communicate(timeout=SECONDS)[1] for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    return [task.returncode for task in tasks], shown


def wait_for_steps(output: Path, number: int, tasks: Sequence[subprocess.Popen[str]]) -> Path:
    """Return the log of metrics when it has this many records."""
    log, deadline = output / "logs" / "metrics.jsonl", time.monotonic() + SECONDS
    while not (log.exists() and log.read_text().count("\n") >= number):
        assert time.monotonic() < deadline
        assert all(task.poll() is None for task in tasks)
        time.sleep(0.1)
    return log


def errors(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if line.startswith("error: ")]


def assert_equal_runs(one: Path, other: Path) -> None:
    """Check that every metric and every weight have the same bits."""
    assert metric_log(one) == metric_log(other)
    weights, others = last_weights(one), last_weights(other)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


@pytest.fixture(scope="module")
def launched(config, tmp_path_factory):
    """Return the output directory of the run of a layout under torchrun, which sets the number of workers."""
    known: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in known:
            known[layout] = tmp_path_factory.mktemp("torchrun") / layout
            path = write(config, known[layout], {"actor_train": LAYOUTS[layout]})
            done = torchrun("thresher", "train", path)
            assert done.returncode == 0, done.stderr
            assert done.stderr.count("runtime torchrun: torchrun started 2 processes") == 1
            assert done.stderr.count("2 x cpu on 1 node") == 1
            assert len(done.stdout.splitlines()) == 1  # the last checkpoint, printed by rank 0
        return known[layout]

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_of_torchrun_equal_two_workers_on_ray_bitwise(config, ray_here, launched, layout, tmp_path):
    values = yaml.safe_load(Path(write(config, tmp_path / "ray", {"actor_train": LAYOUTS[layout]})).read_text())
    DPOPipeline(parse_config(merge(values, {"actor_train": {"num_workers": 2}}))).run()
    assert_equal_runs(launched(layout), tmp_path / "ray")
    losses = [record["loss"] for record in metric_log(tmp_path / "ray") if "loss" in record]
    assert len(set(losses)) == 4


@pytest.mark.parametrize("command", [["check"], ["config", "show"]], ids=["check", "config show"])
def test_commands_without_a_launcher_accept_the_runtime(config, command, tmp_path, monkeypatch, capsys):
    path = write(config, tmp_path / "out", {"runtime": "torchrun", "actor_train": {"num_workers": 2}})
    assert exit_code_of(monkeypatch, (*command, path)) == 0, capsys.readouterr().err
    assert exit_code_of(monkeypatch, ("train", path)) == 2
    assert "runtime is torchrun, but neither torchrun nor srun started this process" in capsys.readouterr().err


@pytest.mark.hand  # CI has a killed run in one process and on Ray
def test_a_run_whose_rank_was_killed_resumes_bitwise_also_under_srun(config, launched, tmp_path):
    path = write(config, tmp_path / "out", {"actor_train": LAYOUTS["replicas"], "async_save": False})
    killed = torchrun("tests.support.launched", "1:kill:3", "train", path)
    assert killed.returncode == 1
    assert [line.startswith("error: the connection to another rank was lost") for line in errors(killed.stderr)] == [
        True
    ]
    checkpoints = tmp_path / "out" / "checkpoints"
    assert [checkpoint.name for checkpoint in checkpoints.iterdir()] == ["step-00000002"]
    codes, shown = finish(start_tasks("thresher", "train", path))
    assert codes == [0, 0], shown
    assert "runtime torchrun: srun started 2 processes" in shown[0]
    assert "resuming from" in shown[0]
    assert_equal_runs(launched("replicas"), tmp_path / "out")
    assert "ready at step 2 of 4" in (tmp_path / "out" / "logs" / "workers" / "actor_train-1.log").read_text()


def test_a_restart_by_torchrun_itself_continues_a_run_that_had_to_start_from_scratch(config, launched, tmp_path):
    changes = {"actor_train": LAYOUTS["replicas"], "async_save": False, "resume_from_checkpoint": False}
    path = write(config, tmp_path / "out", changes)
    done = torchrun("tests.support.launched", "1:kill:3", "train", path, max_restarts=1)
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    assert_equal_runs(launched("replicas"), tmp_path / "out")


@pytest.mark.hand  # CI has the missing heartbeats alone
def test_rank_0_notices_that_a_rank_was_killed_in_a_save_under_srun(config, tmp_path):
    changes = {"actor_train": LAYOUTS["replicas"], "heartbeat_timeout": 10, "runtime": "torchrun"}
    path = write(config, tmp_path / "out", changes)
    codes, shown = finish(start_tasks("tests.support.launched", "1:kill-in-save:2", "train", path))
    assert codes == [2, -signal.SIGKILL], shown
    (line,) = errors(shown[0])
    assert line.startswith("error: rank 1 has sent no heartbeat for ")


def test_the_others_say_that_rank_0_was_killed_under_srun(config, tmp_path):
    """Rank 0 hosts the store, so the others lose it without a word."""
    path = write(config, tmp_path / "out", {"actor_train": LAYOUTS["replicas"], "runtime": "torchrun"})
    codes, shown = finish(start_tasks("tests.support.launched", "0:kill:2", "train", path))
    assert codes == [-signal.SIGKILL, 2], shown
    (line,) = errors(shown[1])
    assert line.startswith("error: rank 0 has ended without saying why; see what it printed, then rerun")
    assert "Traceback" not in shown[1]


@pytest.mark.hand  # CI has the missing heartbeats alone
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_others_notice_that_rank_0_is_stopped_in_a_save(config, tmp_path, launcher):
    changes = {"actor_train": LAYOUTS["replicas"], "heartbeat_timeout": TIMEOUT, "runtime": "torchrun"}
    path = write(config, tmp_path / "out", changes)
    tasks = start(launcher, "tests.support.launched", "0:stop-in-save:2", "train", path)
    seconds = seconds_until_the_other_ends(tasks, stopped=0)
    _, shown = finish(tasks)
    print(f"found after {seconds:.1f} s")
    assert seconds < TIMEOUT + 10
    (line,) = errors("".join(shown))
    assert line.startswith("error: rank 0 has sent no heartbeat for ")


@pytest.mark.hand
def test_a_rank_that_hangs_ends_the_run_after_the_timeout_and_it_resumes_bitwise(config, launched, tmp_path):
    changes = {"actor_train": LAYOUTS["replicas"], "async_save": False, "heartbeat_timeout": 10, "runtime": "torchrun"}
    path = write(config, tmp_path / "out", changes)
    hung = torchrun("tests.support.launched", "1:hang:4", "train", path)
    assert hung.returncode == 1
    (line,) = errors(hung.stderr)
    assert line.startswith("error: no progress for ")
    assert "in step 4: training: another rank hangs, or the step needs longer than heartbeat_timeout=10" in line
    assert torchrun("thresher", "train", path).returncode == 0
    assert_equal_runs(launched("replicas"), tmp_path / "out")


MESHES = {"fsdp2": {}, "tp": {"tp_size": 2}, "pp": {"pp_size": 2}}
TIMEOUT = 12


@pytest.mark.hand  # CI has a stopped worker on Ray, and a rank 0 that is stopped under srun
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_stopped_rank_ends_the_run_within_the_timeout(config, tmp_path, launcher, mesh, stopped):
    check_that_a_stopped_rank_is_found(config, tmp_path, launcher, mesh, stopped)


def test_a_stopped_rank_0_that_hosts_the_store_is_found_in_a_pipeline(config, tmp_path):
    check_that_a_stopped_rank_is_found(config, tmp_path, "srun", "pp", 0)


def check_that_a_stopped_rank_is_found(config, tmp_path: Path, launcher: str, mesh: str, stopped: int) -> None:
    endless = {"max_steps": 100_000, "num_train_epochs": 100_000, "save_steps": 0, "eval_steps": 0}
    changes = {**endless, "heartbeat_timeout": TIMEOUT, "runtime": "torchrun"}
    layout = {"strategy_args": {"strategy_config": MESHES[mesh]}}
    path = write(config, tmp_path / "out", merge(changes, {"actor_train": layout}))
    tasks = start(launcher, "thresher", "train", path)
    wait_for_steps(tmp_path / "out", 6, tasks)
    os.kill(pids_by_rank(tasks)[stopped], signal.SIGSTOP)
    seconds = seconds_until_the_other_ends(tasks, stopped)
    _, shown = finish(tasks)
    print(f"{launcher}, {mesh}, rank {stopped} stopped: found after {seconds:.1f} s")
    assert seconds < TIMEOUT + 10
    (line,) = errors("".join(shown))
    assert line.startswith("error: no progress for ")


def seconds_until_the_other_ends(tasks: list[subprocess.Popen[str]], stopped: int) -> float:
    """Wait until a rank is stopped, and then until the other one has ended, 60 s at most; kill both."""
    deadline = time.monotonic() + SECONDS
    while len(ranks := pids_by_rank(tasks)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)  # torchrun starts them later
    try:
        while state_of(ranks[stopped]) != "T" and time.monotonic() < deadline:
            time.sleep(0.1)
        assert state_of(ranks[stopped]) == "T"
        started = time.monotonic()
        while state_of(ranks[1 - stopped]) not in "ZX" and time.monotonic() < started + 60:
            time.sleep(0.1)
        return time.monotonic() - started
    finally:
        for pid in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def pids_by_rank(tasks: list[subprocess.Popen[str]]) -> dict[int | None, int]:
    return {rank_of(pid): pid for task in tasks for pid in descendants(task.pid) if rank_of(pid) is not None}


def rank_of(pid: int) -> int | None:
    """Return the rank of a process by its environment, None if it has none."""
    names = ("RANK=", "SLURM_PROCID=")
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    found = [each.partition("=")[2] for each in variables if each.startswith(names)]
    return int(found[0]) if found else None


def state_of(pid: int) -> str:
    """Return the letter that the kernel gives the state of a process; X if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def test_an_outsider_in_the_store_finds_no_secrets_and_is_not_obeyed(config, tmp_path):
    """As a process of another user on this machine, which reaches the port of the store."""
    changes = {"max_steps": 30, "num_train_epochs": 30, "save_steps": 0, "eval_steps": 10}
    secret = {"system_envs": {"PLAIN": "private value"}}
    path, (port,) = write(config, tmp_path / "out", changes | secret), free_ports()
    tasks = start_tasks("thresher", "train", path, port=port)
    wait_for_steps(tmp_path / "out", 1, tasks)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=10))
    calls = {name: store.get(name).decode() for name in store.list_keys() if "/call/" in name}
    assert any("output_dir" in value for value in calls.values())
    assert not any("private value" in value for value in calls.values())
    prefix, newest = next(iter(calls)).rpartition("/")[0], max(int(name.rpartition("/")[2]) for name in calls)
    forged = calls[f"{prefix}/1"].replace(str(tmp_path / "out"), str(tmp_path / "elsewhere"))
    for number in range(newest + 1, newest + 12):  # rank 0 may write its own call before rank 1 looks for it
        store.set(f"{prefix}/{number}", forged)
    codes, shown = finish(tasks)
    assert codes == [0, 0], shown
    assert not list(tmp_path.glob("elsewhere*"))
    refusal = "refused a message that no rank of this run has signed: another process writes to its store"
    assert refusal in (tmp_path / "out" / "logs" / "workers" / "actor_train-1.log").read_text()


@pytest.mark.hand  # CI has the same of a worker on Ray
def test_the_error_of_a_rank_is_shown_once_and_ends_all_ranks_with_its_exit_code(config, tmp_path):
    path = write(config, tmp_path / "out", {"system_envs": {"THRESHER_TEST": 7}})
    codes, shown = finish(start_tasks("tests.support.launched", "1:fail:2", "train", path))
    assert codes == [2, 2], shown
    assert [errors(text) for text in shown] == [[], ["error: step 2 fails on purpose"]]
    assert "Traceback" not in "".join(shown)
    logs = tmp_path / "out" / "logs"
    assert "the run ended: step 2 fails on purpose" in (logs / "run.log").read_text()
    assert "environment: THRESHER_TEST=7" in (logs / "workers" / "actor_train-1.log").read_text()


@pytest.mark.hand  # CI has a signal to a run in one process
def test_a_signal_stops_all_ranks_after_the_same_step_and_saves_it(config, tmp_path):
    path = write(config, tmp_path / "out", {"max_steps": 100_000, "save_steps": 0, "eval_steps": 0})
    tasks = start_tasks("thresher", "train", path)
    log = wait_for_steps(tmp_path / "out", 2, tasks)
    for task in tasks:
        task.send_signal(signal.SIGTERM)
    codes, shown = finish(tasks)
    assert codes == [128 + signal.SIGTERM] * 2, shown
    step = json.loads(log.read_text().splitlines()[-1])["step"]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    assert "".join(shown).count(f"stopped on request after step {step} (checkpoint saved)") == 1
    assert not (tmp_path / "out" / "stop").exists()
