"""Callbacks of transformers' Trainer: what they are called with, and how they stop a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState

from tests.support.compared_runs import merge, metric_log
from tests.support.logged import logged
from thresher import DPOPipeline
from thresher.config import parse_config
from thresher.errors import RunStopped


class Recorder(TrainerCallback):
    """Records every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.saved: list[str] = []

    def _add(self, name: str, args: Any, state: TrainerState, control: TrainerControl) -> None:
        assert isinstance(state, TrainerState)
        assert isinstance(control, TrainerControl)
        assert args.learning_rate == 0.01
        self.calls.append((name, state.global_step))

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert state.max_steps == 4
        self._add("begin", args, state, control)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        self._add("log", args, state, control)
        self.logs.append(logs)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any, **_: Any) -> None:
        self._add("evaluate", args, state, control)
        self.evaluations.append(metrics)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, checkpoint: str, **_: Any) -> None:
        self._add("save", args, state, control)
        assert Path(checkpoint, "manifest.json").is_file()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._add("end", args, state, control)


def run(base: dict[str, Any], output: Path, *callbacks: object, **changes: Any) -> list[str]:
    config = parse_config(merge(base, {"output_dir": str(output), **changes}))
    with logged() as records:
        DPOPipeline(config, callbacks=callbacks).run()
    return [record.getMessage() for record in records]


def check_events(recorder: Recorder) -> None:
    calls = [call for call in recorder.calls if call[0] != "save"]
    assert calls == [
        ("begin", 0),
        *[("log", step) for step in (1, 2)],
        *[("log", 2), ("evaluate", 2)],
        *[("log", step) for step in (3, 4)],
        *[("log", 4), ("evaluate", 4)],
        ("end", 4),
    ]
    assert [call for call in recorder.calls if call[0] == "save"] == [("save", 2), ("save", 4)]


def test_callbacks_get_each_event_with_the_names_of_trl(base, tmp_path):
    recorder = Recorder()
    run(base, tmp_path, recorder, EarlyStoppingCallback(early_stopping_patience=10))
    check_events(recorder)
    records = metric_log(tmp_path)
    assert recorder.logs[0]["loss"] == records[0]["loss"]
    assert recorder.logs[0]["learning_rate"] == records[0]["lr"]
    evaluation = next(record for record in records if "eval/loss" in record)
    assert recorder.evaluations[0]["eval_loss"] == evaluation["eval/loss"]


class StopAfter:
    """Stops the run; not a TrainerCallback."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.ended = False

    def on_log(self, _args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        control.should_training_stop = state.global_step >= self.step
        return control

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.ended = True


def test_a_callback_stops_the_run_after_the_next_step(base, tmp_path):
    callback = StopAfter(1)
    with pytest.raises(RunStopped, match="after step 2"):
        run(base, tmp_path, callback, save_steps=0, eval_steps=0)
    assert callback.ended
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_early_stopping_counts_evaluations_without_improvement(base, tmp_path):
    # an improvement must exceed the threshold, so that only the first evaluation is one
    callback = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=100.0)
    with pytest.raises(RunStopped, match="after step 3"):
        run(base, tmp_path, callback, eval_steps=1)


class Failing:
    def on_log(self, *_: Any, **__: Any) -> None:
        raise ZeroDivisionError("from a callback")


def test_the_error_of_a_callback_is_raised(base, tmp_path):
    with pytest.raises(ZeroDivisionError, match="from a callback"):
        run(base, tmp_path, Failing)


class Unsupported(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None: ...

    def on_log(self, _args: Any, _state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_save = True


def test_what_a_callback_cannot_do_is_a_warning(base, tmp_path):
    messages = run(base, tmp_path, Unsupported(), max_steps=1)
    assert any("Unsupported.on_step_end is not called" in message for message in messages)
    assert any("control.should_save, which has no effect" in message for message in messages)
