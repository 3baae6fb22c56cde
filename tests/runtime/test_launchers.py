"""Every way to start a run: the launcher, the script of an example, and a job on an existing cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.forks import python
from tests.support.paths import ROOT
from tests.support.ports import free_ports
from tests.support.small_runs import assert_same_run

pytestmark = pytest.mark.distributed

EXAMPLES = ROOT / "examples"
CONFIG = EXAMPLES / "polite_smollm2" / "dpo_config.yaml"
BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}


def overrides(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield nested values as overrides."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={str(value).replace(' ', '')}"


@pytest.fixture(scope="module")
def tiny(base, tmp_path_factory) -> list[str]:
    """Overrides that make the example train a tiny model on tiny data; all runs share a reference cache."""
    cache = tmp_path_factory.mktemp("cache")
    return [*overrides(base), f"reference.cache_dir={cache}", "~actor_train.training_args.gradient_accumulation_steps"]


def call(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), env=environment() | changes, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def launched(tiny, tmp_path_factory) -> Path:
    """Output directory of a run in one process, started by the launcher."""
    output = tmp_path_factory.mktemp("launched")
    by_name = ["--config_path", "polite_smollm2", "--config_name", "dpo_config"]
    done = call(*python(), EXAMPLES / "start_dpo_pipeline.py", *by_name, *tiny, f"output_dir={output}")
    assert done.returncode == 0, done.stderr
    return output


def test_the_launcher_trains_to_the_final_checkpoint(launched):
    assert [path.name for path in sorted((launched / "checkpoints").iterdir())][-1].endswith("4")


@pytest.mark.hand  # CI has the launcher
def test_the_script_of_an_example_equals_the_launcher(tiny, launched, tmp_path):
    script = EXAMPLES / "polite_smollm2" / "run_dpo_pipeline.sh"
    done = call("bash", script, *tiny, f"output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path, launched)


class HeadNode(NamedTuple):
    """Addresses of a cluster, for drivers and for job submission."""

    address: str
    dashboard: str


@pytest.fixture(scope="module")
def head() -> Iterator[HeadNode]:
    """A head node with a dashboard on loopback, started by `ray start` with the token of the tests."""
    temp_dir = tempfile.mkdtemp(prefix="ray")  # short: it contains sockets, whose paths are limited to 107 characters
    port, dashboard_port, agent_port, client_port = free_ports(4)
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=4", f"--port={port}", f"--temp-dir={temp_dir}"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}", "--disable-usage-stats"]
    command += [f"--dashboard-agent-listen-port={agent_port}", f"--ray-client-server-port={client_port}"]
    log = Path(temp_dir) / "head.log"
    with log.open("w") as stream:
        process = subprocess.Popen(list(map(str, command)), env=environment(), stdout=stream, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 240
        while not accepts(dashboard_port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield HeadNode(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}")
    finally:
        process.terminate()  # with --block, the head stops all its processes
        process.wait(timeout=120)
        shutil.rmtree(temp_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def dashboard(head) -> str:
    return head.dashboard


def accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def train(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return call(*python(), "-m", "thresher", "train", CONFIG, *arguments, **changes)


def test_a_user_error_in_a_worker_ends_the_command_with_its_message_and_exit_code_2(tiny, head, tmp_path):
    diverging = ["max_consecutive_skipped_steps=1", "actor_train.training_args.learning_rate=1e30"]
    done = train(*tiny, *diverging, f"output_dir={tmp_path}", f"ray_address={head.address}")
    assert done.returncode == 2, done.stderr
    message = done.stderr.rpartition("error: ")[2]
    assert re.match(
        r"the loss or gradient was not finite in 1 steps in a row, up to step [23]; lower the learn", message
    )
    assert f"listed in {tmp_path}/logs/skipped_steps.jsonl" in message
    assert len((tmp_path / "logs" / "skipped_steps.jsonl").read_text().splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.fixture
def wrong_token(tmp_path) -> str:
    path = tmp_path / "token"
    path.write_text("0" * 64)
    return str(path)


def test_training_with_a_wrong_token_is_rejected(tiny, head, wrong_token, tmp_path):
    output = tmp_path / "out"
    done = train(*tiny, f"output_dir={output}", f"ray_address={head.address}", RAY_AUTH_TOKEN_PATH=wrong_token)
    assert done.returncode == 2, done.stderr
    assert re.search(
        rf"error: authentication with the Ray cluster at {head.address} failed: .*incorrect; set RAY_AUTH_TOKEN_PATH",
        done.stderr,
    )
    assert "Traceback" not in done.stderr
    assert [path.name for path in output.rglob("*") if path.is_file()] == ["run.log"]


def submit(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return call(*python(), "-m", "thresher", "submit", CONFIG, *arguments, **changes)


@pytest.mark.hand  # CI submits a job that fails
def test_a_submitted_job_on_two_workers_equals_the_launcher(tiny, base, dashboard, launched, tmp_path):
    # relative paths of inputs refer to the uploaded files
    uploaded = tmp_path / "uploaded"
    shutil.copytree(Path(base["pretrain"]).parent, uploaded)
    relative = [each.replace(str(Path(base["pretrain"]).parent) + "/", "") for each in tiny]
    secret = "exp_name=http://me:0pensesame@127.0.0.1:1"
    done = submit(
        *relative,
        f"output_dir={tmp_path / 'out'}",
        "actor_train.num_workers=2",
        secret,
        f"--address={dashboard}",
        f"--working-dir={uploaded}",
        RAY_ADDRESS="http://127.0.0.1:1",  # --address takes precedence
    )
    assert done.returncode == 0, done.stderr + done.stdout
    job = re.search(r"submitted job (\S+)", done.stderr)[1]
    assert f"job {job} succeeded" in done.stderr
    assert "2 x cpu on 1 node" in done.stdout
    assert_same_run(tmp_path / "out", launched)
    listed = call(BIN / "ray", "job", "list", f"--address={dashboard}")
    assert job in listed.stdout
    assert "0pensesame" not in done.stdout + done.stderr + listed.stdout + listed.stderr


def test_the_command_returns_the_exit_code_of_the_job_and_shows_how_to_read_its_log(tiny, dashboard, tmp_path):
    done = submit(*tiny, f"output_dir={tmp_path / 'out'}", f"pretrain={tmp_path / 'nowhere'}", f"--address={dashboard}")
    assert done.returncode == 2
    assert re.search("error: .*nowhere", done.stdout)
    job = re.search(r"submitted job (\S+)", done.stderr)[1]
    assert f"job {job} failed (exit code 2)" in done.stderr
    assert "keep files on a file system that all nodes mount at the same path, or upload them with" in done.stderr
    assert f"see its log with: RAY_AUTH_MODE=token ray job logs {job} --address {dashboard}" in done.stderr


@pytest.mark.hand  # CI has a submitted job that fails
def test_without_wait_the_command_prints_the_job_and_how_to_follow_it(tiny, dashboard, launched, tmp_path):
    with chdir(tmp_path):
        done = submit(*tiny, "output_dir=out", f"--address={dashboard}", "--no-wait")
    assert done.returncode == 0, done.stderr
    assert f"the nodes of the cluster must see these paths: output_dir={tmp_path}/out\n" in done.stderr
    job = done.stdout.strip()
    assert f"submitted job {job}" in done.stderr
    assert f"stop it with: RAY_AUTH_MODE=token ray job stop {job} --address {dashboard}" in done.stderr
    assert not (tmp_path / "out" / "checkpoints").exists()  # the job has just started
    followed = call("bash", "-c", re.search(r"follow it with: (.*)", done.stderr)[1])
    assert followed.returncode == 0, followed.stderr
    assert_same_run(tmp_path / "out", launched)


@pytest.mark.hand  # CI has a submitted job that fails
def test_an_interrupt_leaves_the_job_running_and_says_how_to_stop_it(tiny, dashboard, tmp_path):
    command = [*python(), "-m", "thresher", "submit", CONFIG, *tiny, f"output_dir={tmp_path / 'out'}"]
    command += [f"--address={dashboard}"]
    with subprocess.Popen(list(map(str, command)), env=environment(), stderr=subprocess.PIPE, text=True) as following:
        seen = ""
        while "submitted job" not in seen and (line := following.stderr.readline()):
            seen += line
        following.send_signal(signal.SIGINT)
        _, rest = following.communicate(timeout=120)
    assert following.returncode == 130, seen + rest
    assert "Traceback" not in rest
    stop = re.search(r"keeps running; stop it with: (.*)", rest)[1]
    status = call(*without_variables(stop.replace(" stop ", " status ")))
    assert re.search("PENDING|RUNNING", status.stdout + status.stderr)
    stopped = call("bash", "-c", stop)
    assert "was stopped" in stopped.stdout + stopped.stderr


def without_variables(command: str) -> list[str]:
    return [word for word in shlex.split(command) if not word.startswith("RAY_")]


def test_submitting_with_a_wrong_token_is_rejected(tiny, dashboard, wrong_token, tmp_path):
    done = submit(*tiny, f"output_dir={tmp_path}", f"--address={dashboard}", RAY_AUTH_TOKEN_PATH=wrong_token)
    assert done.returncode == 2
    assert re.search(
        r"error: authentication with the Ray cluster at \S+ failed: .*; set RAY_AUTH_TOKEN_PATH", done.stderr
    )


def test_a_working_directory_that_is_too_large_is_rejected_with_a_hint(tiny, dashboard, tmp_path):
    uploaded = tmp_path / "uploaded"
    uploaded.mkdir()
    (uploaded / "weights").write_bytes(os.urandom(101 << 20))  # Ray's job server takes 100 MiB
    done = submit(*tiny, f"output_dir={tmp_path}", f"--address={dashboard}", f"--working-dir={uploaded}")
    assert done.returncode == 2
    assert re.search(
        r"error: .*rejected the job: .*104857600 exceeded; .*exclude large ones in its \.rayignore", done.stderr
    )


def test_an_unreachable_dashboard_is_reported(tiny, tmp_path):
    done = submit(*tiny, f"output_dir={tmp_path}", "--address=http://127.0.0.1:1")
    assert done.returncode == 2
    assert re.search(r"error: no Ray job server answers at http://127.0.0.1:1: .*refused; give the URL", done.stderr)
