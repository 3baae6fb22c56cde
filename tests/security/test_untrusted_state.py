"""A checkpoint whose digests are right and whose state no run wrote is a told fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.attacks import CommandLine, Run, sign


@pytest.mark.parametrize("name", ["optimizer.json", "rng.json", "trainer.json", "config.json"])
@pytest.mark.parametrize("value", [{}, [1], {"step": "x"}], ids=str)
def test_a_state_that_no_run_wrote_is_told(attacked: Run, thresher: CommandLine, name: str, value: Any) -> None:
    (attacked.checkpoint / name).write_text(json.dumps(value))
    sign(attacked.checkpoint)
    ended = thresher("train", attacked.config(resume_from_checkpoint=str(attacked.checkpoint), max_steps=3))
    # a config that lacks keys only says that they have changed
    assert ended.code == (0 if name == "config.json" and isinstance(value, dict) else 2)
    assert "resume from another checkpoint" in ended.text or ended.code == 0
