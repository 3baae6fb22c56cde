"""The outcome that trackers get when a run ends."""

from __future__ import annotations

import pytest

from thresher.builders.run import track
from thresher.config import parse_config
from thresher.data.batching.plan import make_plan
from thresher.errors import RunStopped, UserError


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
    with pytest.raises(type(error)), track(trackers, config, plan, resume_step=None):
        raise error
    assert trackers.closed == [outcome]
