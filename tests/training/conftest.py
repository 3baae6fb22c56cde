"""Fixtures for small runs: models, a config, and a config whose reference is another model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.compared_runs import merge
from tests.support.tiny_llama import save_tiny_llama


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """An initial policy and a reference with other weights."""
    directory = tmp_path_factory.mktemp("models")
    return save_tiny_llama(directory / "policy", 0), save_tiny_llama(directory / "reference", 1)


@pytest.fixture
def base(models, tmp_path):
    """Policy and reference from the same weights; six steps of 4 pairs over 12 pairs are two epochs."""
    return {
        "pretrain": str(models[0]),
        "output_dir": str(tmp_path / "out"),
        "num_train_epochs": 2,
        "actor_train": {
            "model_args": {"dtype": "fp32"},
            "training_args": {
                "learning_rate": 0.01,
                "per_device_train_batch_size": 4,
                "lr_scheduler_type": "linear",
                "adam_epsilon": 1e-3,
            },
        },
    }


@pytest.fixture
def different_reference(base, models):
    """Policy and reference from different weights, so that margins are not 0."""
    return merge(base, {"reference": {"model_args": {"model_name_or_path": str(models[1])}}})
