"""The outcome that trackers get when a run ends."""

from __future__ import annotations

import pytest

from tests.support.tiny_run import noise_pairs
from thresher.builders.inputs import RunInputs
from thresher.builders.run import track
from thresher.config import parse_config
from thresher.data.batching.plan import make_plan
from thresher.errors import RunStopped, UserError
from thresher.observability.trackers.jsonl import JsonlTracker
from thresher.observability.trackers.tracker import START_OVER, Trackers


class Outcomes:
    """Records how a run was closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def start(self, run, _resume_step):
        run.run_dir.mkdir(parents=True)

    def close(self, status):
        self.closed.append(status)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (SystemExit(130), "interrupted"),  # a second Ctrl-C
        (KeyboardInterrupt(), "interrupted"),
        (RunStopped(3), "interrupted"),
        (UserError("a mistake"), "failed"),
        (ZeroDivisionError(), "failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_a_run_that_a_signal_ends_is_interrupted_not_failed(tmp_path, error, outcome):
    trackers = Outcomes()
    config = parse_config({"output_dir": str(tmp_path / "out")})
    plan = make_plan(8, seed=0, pairs_per_step=4, max_steps=1, num_epochs=None)
    with (
        pytest.raises(type(error)),
        track(trackers, RunInputs(config).replace(plan=plan, train=noise_pairs(1)), resume_step=None),
    ):
        raise error
    assert trackers.closed == [outcome]


@pytest.mark.parametrize(("resume_step", "warns"), [(3, True), (1, False), (None, False), (START_OVER, False)])
def test_a_resumed_run_warns_about_records_that_its_log_lacks(tmp_path, caplog, resume_step, warns):
    config = parse_config({"output_dir": str(tmp_path)})
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.jsonl").write_text('{"step": 1, "lr": 1.0}\n')
    plan = make_plan(8, seed=0, pairs_per_step=4, max_steps=1, num_epochs=None)
    inputs = RunInputs(config).replace(plan=plan, train=noise_pairs(1))
    with track(Trackers([JsonlTracker()], []), inputs, resume_step=resume_step):
        pass
    assert ("has no record of 2 steps from 2 to 3" in caplog.text) == warns
