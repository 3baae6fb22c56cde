"""The settings and files of a small run, without output_dir."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.compared_runs import merge
from tests.support.small_run_fixtures import base
from thresher import DPOConfig

__all__ = ["base"]


@pytest.fixture(scope="session")
def small(base) -> dict[str, Any]:
    """A run of two steps whose reference is the initial policy."""
    return merge(base, {"reference": {"model_args": {}}, "max_steps": 2}) | {"reference": {}}


@pytest.fixture
def config(small, tmp_path) -> DPOConfig:
    """The settings of the run by flat names, without model and data."""
    return DPOConfig(
        output_dir=tmp_path,
        max_steps=2,
        save_steps=2,
        eval_steps=2,
        max_length=64,
        bf16=False,
        template="raw",
        global_batch_size=6,
        track_with=[],
        **{
            name: small["actor_train"]["training_args"][name]
            for name in ("learning_rate", "per_device_train_batch_size", "lr_scheduler_type", "adam_epsilon")
        },
    )


@pytest.fixture
def files(small) -> dict[str, str]:
    """The model and the data of the run."""
    return {
        "model": small["pretrain"],
        "train": small["actor_train"]["data_args"]["file_name"],
        "eval": small["validation"]["data_args"]["file_name"],
    }
