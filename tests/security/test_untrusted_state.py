"""A checkpoint with correct digests and invalid state is rejected with a hint."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.attacks import CommandLine, Run, update_manifest


@pytest.mark.parametrize("name", ["optimizer.json", "rng.json", "trainer.json", "config.json"])
@pytest.mark.parametrize("value", [{}, [1], {"step": "x"}], ids=str)
def test_invalid_state_is_rejected(attacked: Run, thresher: CommandLine, name: str, value: Any) -> None:
    (attacked.checkpoint / name).write_text(json.dumps(value))
    update_manifest(attacked.checkpoint)
    result = thresher("train", attacked.config(resume_from_checkpoint=str(attacked.checkpoint), max_steps=3))
    # a config that lacks keys only counts as changed
    assert result.code == (0 if name == "config.json" and isinstance(value, dict) else 2)
    assert "resume from a different checkpoint" in result.text or result.code == 0
