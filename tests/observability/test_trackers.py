"""The fan-out to several trackers, the factory, the console and memory metrics."""

import errno
import io
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from thresher.errors import DiskError, UserError
from thresher.observability.machine import memory_metrics
from thresher.observability.trackers.console import ConsoleTracker
from thresher.observability.trackers.jsonl import JsonlTracker, read_metrics
from thresher.observability.trackers.libraries import make_trackers
from thresher.observability.trackers.tracker import RunInfo, Status, Trackers


def run_in(directory: Path, **config: object) -> RunInfo:
    return RunInfo("my-run", directory, config, total_steps=10, total_pairs=640)


class Recorder:
    """Record all calls, and raise in one of them."""

    def __init__(self, name: str = "recorder", fail_in: str = "", error: Exception | None = None) -> None:
        self.name = name
        self.calls: list[object] = []
        self._fail_in = fail_in
        self._error = error or ConnectionError("no route to https://me:hunter2@host/x")

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        self._record("start", (dict(run.config), resume_step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        self._record("log", step)

    def close(self, status: Status) -> None:
        self._record("close", status)

    def _record(self, call: str, argument: object) -> None:
        self.calls.append(argument)
        if call == self._fail_in:
            raise self._error


@pytest.mark.parametrize("fail_in", ["start", "log", "close"])
def test_a_failing_tracker_is_reported_once_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fail_in: str
) -> None:
    failing, working = Recorder("failing", fail_in), Recorder()
    trackers = Trackers([JsonlTracker()], [failing, working])
    trackers.start(run_in(tmp_path), None)
    for step in (1, 2, 3):
        trackers.log(step, {"loss": 0.5})
    trackers.close("finished")
    assert working.calls == [({}, None), 1, 2, 3, "finished"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    (report,) = caplog.messages
    assert caplog.records[0].levelname == "WARNING"
    assert "tracker failing failed" in report
    assert "hunter2" not in report


def test_a_failing_local_log_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = Trackers([Recorder("jsonl", "log", OSError(errno.ENOSPC, "disk full"))], [])
    trackers.start(run_in(tmp_path), None)
    with pytest.raises(DiskError, match="could not write the log of the run: disk full; free some space"):
        trackers.log(1, {})
    assert caplog.messages == []


def test_a_user_error_of_a_tracker_ends_the_run_at_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = Trackers([], [Recorder("wandb", "start", UserError("run `wandb login`"))])
    with pytest.raises(UserError, match="wandb login"):
        trackers.start(run_in(tmp_path), None)
    assert caplog.messages == []


def test_other_trackers_are_closed_when_the_local_log_fails_to_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    working = Recorder()
    trackers = Trackers([Recorder("jsonl", "close", OSError(errno.ENOSPC, "disk full"))], [working])
    with pytest.raises(DiskError, match="could not write the log of the run: disk full; free some space"):
        trackers.close("finished")
    assert working.calls == ["finished"]
    assert caplog.messages == []


def test_no_tracker_sees_a_secret(tmp_path: Path) -> None:
    recorder = Recorder()
    Trackers([], [recorder]).start(run_in(tmp_path / "new", hf_token="canary", beta=0.1), 5)
    assert recorder.calls == [({"hf_token": "***", "beta": 0.1}, 5)]


def test_an_unknown_tracker_is_rejected_with_a_suggestion_and_all_names() -> None:
    with pytest.raises(UserError, match=r"'tensorbord'; did you mean tensorboard\? .*console, tensorboard, .*trackio"):
        make_trackers(["jsonl", "tensorbord"])
    with pytest.raises(UserError, match="unknown tracker 'x'; the trackers are"):
        make_trackers(["x"])


def test_the_local_log_is_always_on_and_names_may_repeat(tmp_path: Path) -> None:
    trackers = make_trackers(["jsonl", "jsonl"])
    trackers.start(run_in(tmp_path), None)
    trackers.log(1, {"loss": 0.5})
    trackers.close("finished")
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("mlflow", "sqlalchemy"),
        ("trackio", "trackio"),
    ],
)
def test_a_missing_library_names_the_package_to_install(name: str, module: str) -> None:
    # in a subprocess, because MLflow imported without sqlalchemy never finds its store again
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from thresher.observability.trackers.libraries import make_trackers\n"
        "from thresher.errors import UserError\n"
        f"try: make_trackers([{name!r}])\n"
        "except UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"pip install 'thresher[{name}]'" in done.stdout


def test_a_library_that_cannot_be_imported_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "trackio.py").write_text("raise ImportError('no module named protobuf')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from thresher.observability.trackers.libraries import make_trackers\n"
        "from thresher.errors import UserError\n"
        "try: make_trackers(['trackio'])\n"
        "except UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "tracker trackio needs trackio, which is installed but cannot be imported (no module" in done.stdout


def test_importing_observability_imports_no_tracker_library() -> None:
    code = (
        "import sys, thresher.observability; "
        "names = 'wandb', 'mlflow', 'trackio', 'tensorboard', 'torch.utils.tensorboard'; "
        "print([name for name in names if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def show() -> list[str]:
    stream = io.StringIO()
    times = iter([0.0, 20.0, 30.0, 30.0, 30.0])
    tracker = ConsoleTracker(Console(file=stream, width=200), clock=lambda: next(times))
    tracker.start(run_in(Path("runs") / "a"), 2)
    tracker.log(4, {"loss": 0.69314, "rewards/accuracies": 0.5, "pairs_per_second": 12.34, "lr": 1e-6})
    tracker.print("saved [step-00000004] to " + "x" * 300)
    assert not tracker.show_work("evaluating", 3, 7)
    tracker.log(4, {"eval/loss": 0.5, "eval/rewards/accuracies": 0.75, "eval/kl": 0.1})
    tracker.log(5, {"loss": 0.6})
    tracker.close("finished")
    return stream.getvalue().splitlines()


def test_a_pipe_gets_one_plain_line_per_log_call() -> None:
    assert show() == [
        "my-run: 10 steps, resumed after step 2, in runs/a",
        # 2 steps in 20 seconds: the other 6 take 60.
        "step 4/10  loss 0.6931  accuracy 0.500  12.3 pairs/s  eta 0:01:00",
        "saved [step-00000004] to " + "x" * 300,
        "step 4/10  evaluation: loss 0.5000  accuracy 0.750",
        "step 5/10  loss 0.6000  eta 0:00:50",
        "finished after 0:00:30",
    ]


def test_the_console_writes_to_stderr_only(tmp_path: Path) -> None:
    code = (
        "import pathlib; from thresher.observability.trackers.tracker import RunInfo; "
        "from thresher.observability.trackers.libraries import make_trackers; t = make_trackers(['console']); "
        f"t.start(RunInfo('r', pathlib.Path({str(tmp_path)!r}), {{}}, 2, 2), None); "
        "t.log(1, {'loss': 0.5}); t.close('finished')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "step 1/2  loss 0.5000" in done.stderr


def test_peak_memory_includes_an_allocation() -> None:
    code = (
        "from thresher.observability.machine import memory_metrics as m; a = m(); x = b'1' * 500_000_000; b = m(); "
        "print(b['memory/peak_rss_gb'] - a['memory/peak_rss_gb'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(0.5, abs=0.05)
    assert 0 < memory_metrics()["memory/peak_rss_gb"] < 1000
