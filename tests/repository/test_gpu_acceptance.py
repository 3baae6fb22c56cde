"""The acceptance script for GPUs runs on CPUs, and its report says which parts failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.paths import ROOT

QUICK = (
    *("environment", "attention", "attention_heads", "lm_head"),
    *("families", "compiled", "host_reads", "speed", "collectives"),
)
LONG = ("parity", "failure", "stall", "ray")  # runs, of which CI has tests


def accept(output: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.acceptance", "--device", "cpu", "--output", str(output), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert output.exists(), done.stderr
    report: dict[str, Any] = json.loads(output.read_text())
    return done.returncode, report


@pytest.mark.slow
@pytest.mark.hand
def test_the_parts_that_train_pass_on_a_cpu(tmp_path):
    code, report = accept(tmp_path / "report.json")
    assert {part["status"] for part in report["parts"].values()} == {"ok"}, report
    assert code == 0
    assert report["parts"].keys() == {*QUICK, *LONG}
    assert report["parts"]["failure"]["bitwise"] is True


@pytest.mark.slow
def test_the_other_parts_pass_on_a_cpu(tmp_path):
    code, report = accept(tmp_path / "report.json", "--parts", *QUICK)
    assert {part["status"] for part in report["parts"].values()} == {"ok"}, report
    assert code == 0
    assert report["parts"].keys() == set(QUICK)
    assert report["parts"]["environment"]["torch"] == torch.__version__
    assert len(set(report["parts"]["host_reads"]["reads_per_step"])) == 1
    assert 0 < report["parts"]["attention"]["largest_error"] < 1e-5
    # 6 FLOPs per parameter and token: the model of the part has this many parameters
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert report["parts"]["speed"]["parameters"] == 2 * layer + 2 * 64 * 64 + 64


def test_a_part_that_fails_or_cannot_run_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.acceptance.report import Facts, Place, Skipped, check, run_parts, write_report

    def wrong(place: Place) -> Facts:
        check(2 < 1, "2 is not below 1")
        return {}

    def impossible(place: Place) -> Facts:
        raise Skipped(f"it needs two GPUs, and there are {place.num_devices}")

    def right(place: Place) -> Facts:
        return {"device": place.device}

    place = Place("cuda", 1, tmp_path)
    parts = run_parts({"wrong": wrong, "impossible": impossible, "right": right}, place)
    write_report(tmp_path / "report.json", place, parts)
    found = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [found[name]["status"] for name in ("wrong", "impossible", "right")] == ["failed", "skipped", "ok"]
    assert found["wrong"]["reason"] == "AssertionError: 2 is not below 1"
    assert "check(2 < 1" in found["wrong"]["traceback"]
    assert found["impossible"]["reason"] == "it needs two GPUs, and there are 1"
    assert found["right"]["device"] == "cuda"
