"""The file format of the skipped-step log; tests/runtime checks the records of complete runs."""

from __future__ import annotations

import json
import math

import pytest

from thresher.errors import DiskError
from thresher.observability.trackers.jsonl import StepLog
from thresher.training.records import NonFiniteExample, SkippedStep

STEP = SkippedStep("gradient", math.nan, (NonFiniteExample(3, "ab" * 16, None),), consecutive=1, ends_run=False)


def test_a_record_is_valid_json_without_nan(tmp_path):
    StepLog(tmp_path / "run" / "logs" / "skipped_steps.jsonl", None).write(STEP.to_json(7))
    (line,) = (tmp_path / "run" / "logs" / "skipped_steps.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 7,
        "reason": "gradient",
        "grad_norm": "nan",
        "in_a_row": 1,
        "pairs": [{"pair": 3, "hash": "ab" * 16, "fault": "not known"}],
    }


def test_restarting_from_the_beginning_discards_all_records(tmp_path):
    StepLog(tmp_path / "skipped_steps.jsonl", None).write(STEP.to_json(1))
    StepLog(tmp_path / "skipped_steps.jsonl", -1)
    assert (tmp_path / "skipped_steps.jsonl").read_text() == ""


def test_a_full_disk_raises_a_disk_error(tmp_path):
    skipped = StepLog(tmp_path / "skipped_steps.jsonl", None)
    skipped.path.symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"could not write the log of the run.*: No space left on device; free"):
        skipped.write(STEP.to_json(7))
