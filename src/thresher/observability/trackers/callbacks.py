"""Callbacks of transformers' Trainer as a tracker.

They are called where metrics are logged, in the process that starts the run, and get transformers' own TrainerState and
TrainerControl. Metrics have the names of TRL: `eval_loss` and `learning_rate`, not `eval/loss` and `lr`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from thresher.observability.trackers.tracker import RunInfo, Status, Table

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

EVENTS = ("on_train_begin", "on_log", "on_evaluate", "on_save", "on_train_end")
_REQUESTS = ("should_save", "should_evaluate", "should_log", "should_epoch_stop")


class CallbackTracker:
    """Calls the methods `on_*` of callbacks: instances or classes, of `TrainerCallback` or any other type.

    Args:
        args: Settings under the names of TrainingArguments.
        stop_file: Created when a callback sets `control.should_training_stop`.
        checkpoints: Lists the published checkpoints by step.
    """

    name = "callbacks"

    def __init__(
        self,
        callbacks: Sequence[object],
        args: SimpleNamespace,
        stop_file: Path,
        checkpoints: Callable[[], Mapping[int, Path]],
    ) -> None:
        from transformers import TrainerControl, TrainerState

        self._callbacks = [each() if isinstance(each, type) else each for each in callbacks]
        self._args = args
        self._stop_file = stop_file
        self._checkpoints = checkpoints
        self._saved: set[int] = set()
        self._has_begun = False
        self.state = TrainerState()
        self.control = TrainerControl()
        for callback in self._callbacks:
            _warn_about_other_events(callback)

    def start(self, run: RunInfo, resume_step: int | None) -> None:
        """Call on_train_begin once, however often the run is restarted."""
        self.state.max_steps, self.state.global_step = run.total_steps, max(0, resume_step or 0)
        self._saved = set(self._checkpoints())
        if not self._has_begun:
            self._has_begun = True
            self._call("on_train_begin")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call on_save for checkpoints published since the last call, then on_log, and on_evaluate for evaluations."""
        self._report_saves()
        named = _record(self.state, step, metrics)
        self._call("on_log", logs=dict(named))
        if any(name.startswith("eval/") for name in metrics):
            self._call("on_evaluate", metrics=dict(named))
            # after on_evaluate, as in transformers: a callback compares with the best evaluation before this one
            _update_best(self.state, self._args, named)

    def log_table(self, step: int, table: Table) -> None:
        """Call nothing: callbacks of transformers have no event for tables."""

    def close(self, status: Status) -> None:
        """Call on_train_end, unless the run failed or is restarted."""
        self._report_saves()
        if status == "finished" or self.control.should_training_stop:
            self._call("on_train_end")

    def _report_saves(self) -> None:
        current = self.state.global_step
        for step, path in sorted(self._checkpoints().items()):
            if step not in self._saved:
                self._saved.add(step)
                self.state.global_step = step
                self._call("on_save", checkpoint=str(path))
        self.state.global_step = current

    def _call(self, event: str, **arguments: Any) -> None:
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            returned: TrainerControl | None = method(self._args, self.state, self.control, **arguments)
            self.control = returned or self.control
        if requested := [name for name in _REQUESTS if getattr(self.control, name)]:
            logger.warning(
                "a callback set control.%s, which has no effect; see eval_steps and save_steps", requested[0]
            )
            for name in requested:
                setattr(self.control, name, False)
        if self.control.should_training_stop:
            self._stop_file.touch()


def name_in_trl(name: str) -> str:
    """Return what TRL calls a metric: `eval_loss` is `eval/loss`, `learning_rate` is `lr`."""
    return "learning_rate" if name == "lr" else name.replace("eval/", "eval_", 1) if name.startswith("eval/") else name


def read_state(records: Iterable[Mapping[str, Any]], args: SimpleNamespace) -> TrainerState:
    """Rebuild the state that callbacks see from the records of `metrics.jsonl`."""
    from transformers import TrainerState

    state = TrainerState()
    for record in records:
        named = _record(state, int(record["step"]), {name: each for name, each in record.items() if name != "step"})
        _update_best(state, args, named)
    return state


def _record(state: TrainerState, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Add one log entry to the state, and return it under the names of TRL."""
    named = {name_in_trl(name): value for name, value in metrics.items()}
    state.global_step = step
    state.epoch = metrics.get("epoch", state.epoch)
    state.log_history.append({**named, "step": step})
    return named


def _update_best(state: TrainerState, args: SimpleNamespace, metrics: Mapping[str, float]) -> None:
    value, best = metrics.get(args.metric_for_best_model), state.best_metric
    if value is None:
        return
    if best is None or (value > best if args.greater_is_better else value < best):
        state.best_metric, state.best_global_step = value, state.global_step


def _warn_about_other_events(callback: object) -> None:
    from transformers import TrainerCallback

    others = [name for name in dir(type(callback)) if name.startswith("on_") and name not in EVENTS]
    own = [name for name in others if getattr(type(callback), name) is not getattr(TrainerCallback, name, None)]
    if own:
        methods, events = f"{type(callback).__name__}.{', '.join(own)}", ", ".join(EVENTS)
        logger.warning("%s is not called; callbacks are called for %s", methods, events)
