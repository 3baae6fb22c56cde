"""The local log is complete, has no duplicate records, and a resume does not change it."""

import json
import math
from pathlib import Path

import pytest
import torch

from thresher.errors import UserError
from thresher.observability.trackers.jsonl import JsonlTracker, find_holes, read_metrics
from thresher.observability.trackers.tracker import RunInfo


def run_in(directory: Path) -> RunInfo:
    return RunInfo("experiment", directory, {}, total_steps=10, total_pairs=100)


def log_steps(directory: Path, resume_step: int | None, steps: range) -> Path:
    tracker = JsonlTracker()
    tracker.start(run_in(directory), resume_step)
    for step in steps:
        tracker.log(step, {"loss": 1 / (step + 3)})
        if step % 2 == 0:
            tracker.log(step, {"eval/loss": 0.1 + step})
    tracker.close("finished")
    return directory / "metrics.jsonl"


def test_values_round_trip_exactly(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(run_in(tmp_path), None)
    tracker.log(1, {"a": 0.1 + 0.2, "b": math.nan, "c": -math.inf, "d": torch.tensor(0.5), "e": 3})
    tracker.close("finished")
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["b"] == "nan"
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert repr(record) == repr({"step": 1, "a": 0.1 + 0.2, "b": math.nan, "c": -math.inf, "d": 0.5, "e": 3})


def test_every_line_is_written_before_the_next_step(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(run_in(tmp_path), None)
    tracker.log(1, {"loss": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 0.5}]
    tracker.close("failed")


@pytest.mark.parametrize("killed_at", range(3, 9))
@pytest.mark.parametrize("torn", ["", '{"step": 9, "lo', '{"step": 9}'])
def test_a_resumed_log_equals_an_uninterrupted_one(tmp_path: Path, killed_at: int, torn: str) -> None:
    (tmp_path / "uninterrupted").mkdir()
    (tmp_path / "killed").mkdir()
    uninterrupted = log_steps(tmp_path / "uninterrupted", None, range(1, 11))
    path = log_steps(tmp_path / "killed", None, range(1, killed_at + 1))
    with path.open("a") as file:
        file.write(torn)
    log_steps(tmp_path / "killed", 3, range(4, 11))
    assert path.read_bytes() == uninterrupted.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_resume_without_a_log_starts_one(tmp_path: Path) -> None:
    path = log_steps(tmp_path, 3, range(4, 6))
    assert [record["step"] for record in read_metrics(path)] == [4, 4, 5]


def test_a_new_run_never_overwrites_an_old_log(tmp_path: Path) -> None:
    first = log_steps(tmp_path, None, range(1, 2)).read_bytes()
    second = log_steps(tmp_path, None, range(1, 3)).read_bytes()
    log_steps(tmp_path, None, range(1, 4))
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == first
    assert (tmp_path / "metrics.2.jsonl").read_bytes() == second
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4


def test_an_invalid_line_inside_the_log_is_reported_and_the_file_is_unchanged(tmp_path: Path) -> None:
    path = log_steps(tmp_path, None, range(1, 4))
    broken = path.read_text().replace('{"step": 2, "loss"', "garbage", 1)
    path.write_text(broken)
    with pytest.raises(UserError, match=r"line 2 of .*repair the file"):
        log_steps(tmp_path, 3, range(4, 5))
    assert path.read_text() == broken


def test_a_metric_cannot_be_named_step(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(run_in(tmp_path), None)
    with pytest.raises(ValueError, match="step"):
        tracker.log(1, {"step": 2.0})
    tracker.close("failed")


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([1, 2, 3, 4, 5, 6, 7], None),
        ([4, 5, 6], None),  # of a run that began elsewhere
        ([1, 2], "has no record of 4 steps from 3 to 6"),
        ([1, 2, 3, 5, 6], "has no record of step 4"),
        ([], "has no record of 6 steps from 1 to 6"),
        ([1, 2, 3, 3, 4, 5, 6], "has several records of step 3"),
    ],
)
def test_a_hole_in_the_log_of_a_resumed_run_is_found(tmp_path: Path, steps: list[int], problem: str | None) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [{"step": step, "lr": 1.0} for step in steps] + [{"step": 2, "eval/loss": 1.0}]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    found = find_holes(path, 6, 1)
    assert (found or "").partition(";")[0] == ("" if problem is None else f"{path} {problem}")
    path.unlink()
    assert find_holes(path, 6, 3) is not None


def test_a_number_that_no_float_holds_is_infinite_and_a_deep_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1' + "0" * 400 + "}\n")
    assert read_metrics(path) == [{"step": 1, "loss": math.inf}]
    path.write_text('{"step": 1, "loss": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(UserError, match=r"line 1 of .* is not a metrics record"):
        read_metrics(path)
