"""A real tiny run to report on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.compared_runs import merge
from tests.support.small_runs import make_base
from thresher.config import parse_config
from thresher.pipeline import DPOPipeline


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with evaluations after steps 2 and 4."""
    directory = tmp_path_factory.mktemp("reported")
    values: dict[str, Any] = make_base(directory)
    DPOPipeline(parse_config({**values, "output_dir": str(directory / "tiny")})).run()
    return directory / "tiny"


Row = dict[str, Any]


def run_on(directory: Path, row_of: Callable[[Row, int], Row], **changes: Any) -> Path:
    """A run on the rows of small runs in another format; row_of gets a pair and its number."""
    values = make_base(directory)
    for name in ("train", "validation"):
        path = directory / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row_of(row, at)) + "\n" for at, row in enumerate(rows)))
    output = directory / "run"
    DPOPipeline(parse_config(merge(values, {"output_dir": str(output), **changes}))).run()
    return output


def labelled(row: Row, at: int) -> Row:
    return {"prompt": row["prompt"], "completion": row["chosen"], "label": at % 2 == 0}


def ranked(row: Row, at: int) -> Row:
    """Two to four responses."""
    words = [f"w{i}" for i in np.random.default_rng(at).integers(4, 60, 2 + at % 3)]
    return {"prompt": row["prompt"], "completions": words, "scores": list(range(len(words), 0, -1))}


@pytest.fixture(scope="session")
def label_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on(tmp_path_factory.mktemp("labels"), labelled, pref_loss="kto")


@pytest.fixture(scope="session")
def list_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on(tmp_path_factory.mktemp("lists"), ranked, pref_loss="plackett_luce")


@pytest.fixture(scope="session")
def reward_model_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on(tmp_path_factory.mktemp("rewards"), lambda row, _: row, pref_loss="bradley_terry", reference=None)
