"""The training loop: which evaluation ranks a checkpoint, and how a requested stop ends a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.compared_runs import merge
from tests.support.tiny_run import MetricsInMemory, TinyRun, build_run, noise_pairs
from thresher.checkpoint.manifest import read_manifest
from thresher.errors import RunStopped
from thresher.observability.trackers.jsonl import StepLog
from thresher.training.loop import fit


def saved_metrics(run: TinyRun) -> dict[str, set[str]]:
    """The names of the metrics in the manifest of each checkpoint."""
    checkpoints = (Path(run.config.output_dir) / "checkpoints").glob("step-*")
    return {path.name: set(read_manifest(path).metrics) for path in checkpoints}


@pytest.mark.parametrize("async_save", [False, True])
def test_only_an_evaluation_of_the_same_step_ranks_a_checkpoint(base, async_save):
    """Six steps; the evaluation of step 2 says nothing about the weights of step 3."""
    changes = {"eval_steps": 2, "save_steps": 3, "save_total_limit": 6, "async_save": async_save}
    run = build_run(merge(base, changes), noise_pairs(12), noise_pairs(3, seed=5))
    run.fit()
    metrics = saved_metrics(run)
    assert metrics.keys() == {"step-00000003", "step-00000006"}
    assert metrics["step-00000003"] == set()
    assert "eval/loss" in metrics["step-00000006"]


def test_the_end_of_each_epoch_is_evaluated_and_saved(base):
    """Epochs of 11 pairs end after steps 3 and 6, and the run after step 8."""
    changes = {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 8, "num_train_epochs": 3}
    run = build_run(merge(base, {**changes, "save_total_limit": 6}), noise_pairs(11), noise_pairs(3, seed=5))
    run.fit()
    assert [step for step, metrics in run.log.records if "eval/loss" in metrics] == [3, 6, 8]
    assert {name for name, metrics in saved_metrics(run).items() if "eval/loss" in metrics} == {
        "step-00000003",
        "step-00000006",
        "step-00000008",
    }


def test_a_run_resumed_in_an_epoch_ends_as_if_it_had_never_stopped(base):
    changes = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    pairs, held_out = noise_pairs(12), noise_pairs(3, seed=5)
    whole = build_run(merge(base, {**changes, "output_dir": f"{base['output_dir']}-whole"}), pairs, held_out)
    whole.fit()
    stopped = build_run(merge(base, changes), pairs, held_out)
    stopped = replace(stopped, log=StopRequest(3, stopped.config.stop_file))
    with pytest.raises(RunStopped, match="after step 4"):
        stopped.fit()
    stopped.config.stop_file.unlink()
    resumed = build_run(merge(base, changes), pairs, held_out)
    resumed.trainer.resume(Path(base["output_dir"]) / "checkpoints" / "step-00000004")
    resumed.fit()
    assert [step for step, metrics in resumed.log.records if "eval/loss" in metrics] == [6]
    assert saved_metrics(resumed).keys() == {"step-00000003", "step-00000004", "step-00000006"}
    for name, weight in whole.trainer.engine.weights().items():
        assert torch.equal(weight, resumed.trainer.engine.weights()[name]), name


def test_a_finished_run_that_is_resumed_returns_its_last_evaluation(base):
    pairs, held_out = noise_pairs(12), noise_pairs(3, seed=5)
    expected = build_run(base, pairs, held_out).fit()
    assert "eval/loss" in expected
    again = build_run(base, pairs, held_out)
    again.trainer.resume(Path(base["output_dir"]) / "checkpoints" / "step-00000006")
    assert again.fit() == expected
    assert again.log.records == []


def test_a_resumed_run_does_not_evaluate_before_its_first_step(base):
    """eval_on_start is about the initial policy."""
    values = merge(base, {"eval_on_start": True, "save_steps": 4, "save_total_limit": 6})
    whole, resumed = (build_run(values, noise_pairs(12), noise_pairs(3, seed=5)) for _ in range(2))
    whole.fit()
    resumed.trainer.resume(Path(base["output_dir"]) / "checkpoints" / "step-00000004")
    resumed.fit()
    evaluated = [[step for step, metrics in run.log.records if "eval/loss" in metrics] for run in (whole, resumed)]
    assert evaluated == [[0, 6], [6]]


def test_the_strategy_no_evaluates_and_saves_the_final_step_only(base):
    """YAML reads `no` as false."""
    run = build_run(
        merge(base, {"eval_strategy": False, "save_strategy": "no"}), noise_pairs(12), noise_pairs(3, seed=5)
    )
    run.fit()
    assert run.config.eval_strategy == "no"
    assert [step for step, metrics in run.log.records if "eval/loss" in metrics] == [6]
    assert saved_metrics(run).keys() == {"step-00000006"}


class StopRequest(MetricsInMemory):
    """A tracker that requests a stop when a step is logged, which is during the next step."""

    def __init__(self, step: int, file: Path):
        super().__init__()
        self._step, self._file = step, file

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        if step == self._step:
            self._file.parent.mkdir(exist_ok=True)
            self._file.touch()


def run_with_stop_after(step: int, base: dict[str, Any]) -> TinyRun:
    run = build_run(base, noise_pairs(12))
    return replace(run, log=StopRequest(step - 1, run.config.stop_file))


def test_a_stop_saves_the_current_step_and_ends_the_run(base):
    run = run_with_stop_after(3, base)
    with pytest.raises(RunStopped, match="after step 3"):
        run.fit()
    assert saved_metrics(run).keys() == {"step-00000003"}


def test_a_stop_during_the_last_step_is_the_end_of_the_run(base):
    """All steps are done, so there is nothing to resume and the exit code is 0."""
    run = run_with_stop_after(6, base)
    run.fit()
    assert run.trainer.stopped_at == run.trainer.plan.num_steps == 6
    assert saved_metrics(run).keys() == {"step-00000006"}


# two per step; other layouts would pack all pairs of a step into one
MICRO_BATCHES = {
    "layout": "padded",
    "actor_train": {"training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}},
}


@pytest.fixture
def discards_slow_steps(monkeypatch):
    monkeypatch.setattr("thresher.engines.accumulate.SECONDS_BEFORE_DISCARD", 0.0)


@pytest.mark.usefixtures("discards_slow_steps")
@pytest.mark.parametrize("loss", ["sigmoid", "aot"])
def test_a_slow_step_is_discarded_and_the_resumed_run_ends_as_if_it_had_never_stopped(base, loss):
    """The stop is requested when step 3 is logged, and seen in step 4."""
    lora = {"lora_rank": 4, "lora_dropout": 0.1}
    values = merge(merge(base, MICRO_BATCHES), {"pref_loss": loss, "actor_train": {"model_args": lora}})
    whole, stopped, resumed = (
        build_run(merge(values, {"output_dir": f"{base['output_dir']}-{name}"}), noise_pairs(12))
        for name in ("whole", "stopped", "stopped")
    )
    torch.manual_seed(0)
    whole.fit()
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    with pytest.raises(RunStopped, match=r"after step 3 \(checkpoint saved\)"):
        replace(stopped, log=StopRequest(3, stopped.config.stop_file)).fit()
    assert saved_metrics(stopped).keys() == {"step-00000003"}
    stopped.config.stop_file.unlink()
    torch.manual_seed(1)
    resumed.trainer.resume(Path(resumed.config.output_dir) / "checkpoints" / "step-00000003")
    resumed.fit()
    assert torch.equal(torch.get_rng_state(), expected)
    for name, weight in whole.trainer.engine.weights().items():
        assert torch.equal(weight, resumed.trainer.engine.weights()[name]), name


@pytest.mark.usefixtures("discards_slow_steps")
def test_a_step_that_is_discarded_after_a_resume_needs_no_new_checkpoint(base):
    values = merge(base, {**MICRO_BATCHES, "save_steps": 2})
    first, again = (build_run(values, noise_pairs(12)) for _ in range(2))
    file = first.config.stop_file
    file.parent.mkdir()
    file.touch()
    with pytest.raises(RunStopped, match=r"before the first step was complete \(nothing to save\)"):
        first.fit()
    assert saved_metrics(first) == {}
    file.unlink()
    with pytest.raises(RunStopped, match="after step 2"):
        replace(first, log=StopRequest(2, file)).fit()
    (checkpoint,) = (Path(base["output_dir"]) / "checkpoints").glob("step-*")
    written = checkpoint.stat().st_ctime_ns
    again.trainer.resume(checkpoint)
    with pytest.raises(RunStopped, match="after step 2"):
        again.fit()
    assert checkpoint.stat().st_ctime_ns == written


def test_a_fast_step_is_finished_before_the_run_stops(base):
    run = run_with_stop_after(3, merge(base, MICRO_BATCHES))
    with pytest.raises(RunStopped, match="after step 3"):
        run.fit()


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, [(0, 3), (1, 3), (2, 3)]), (1000.0, [])])
def test_only_a_long_evaluation_reports_its_progress(base, monkeypatch, seconds, shown):
    monkeypatch.setattr("thresher.training.trainer._SECONDS_BETWEEN_PROGRESS", seconds)
    changes = {"actor_train": {"training_args": {"per_device_eval_batch_size": 1}}, "max_steps": 1, "eval_steps": 0}
    run = build_run(merge(base, changes), noise_pairs(12), noise_pairs(3, seed=5))
    calls: list[tuple[str, int, int]] = []
    skipped = StepLog(Path(run.config.output_dir) / "logs" / "skipped_steps.jsonl", None)

    def show(what: str, done: int, total: int) -> None:
        calls.append((what, done, total))

    fit(run.trainer, run.config, run.trainer.plan, run.log, skipped, show_progress=show)
    assert calls == [("evaluating after step 1, batches", *each) for each in shown]
    assert len(run.log.evaluations()) == 1
