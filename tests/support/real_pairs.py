"""Tokenized pairs, models and objectives for tests that compare numbers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from transformers import AutoTokenizer

from tests.support.paths import ROOT
from thresher.config.roles import TrainingArgs
from thresher.data.example import Example, ExampleBatch
from thresher.engines.accumulate import MicroBatch
from thresher.engines.engine import Engine, TrainEngine
from thresher.engines.native.build import infer_engine, train_engine
from thresher.losses.objective import Objective
from thresher.losses.registry import make_losses
from thresher.models.layouts import PaddedLayout
from thresher.models.loading.load import load_model

TokenPair = tuple[list[int], list[int], list[int]]


def minimal_dpo() -> ModuleType:
    """Import examples/minimal_dpo.py, the independent oracle."""
    spec = importlib.util.spec_from_file_location("minimal_dpo", ROOT / "examples" / "minimal_dpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def polite_rows(path: Path, count: int) -> list[dict[str, str]]:
    rows = json.loads(path.read_text())
    usable = [row for row in rows if row["chosen"] != row["rejected"]]
    return [
        {"prompt": row["instruction"] + "\n", "chosen": row["chosen"], "rejected": row["rejected"]}
        for row in usable[:count]
    ]


def token_pairs(model_dir: Path, rows: Sequence[dict[str, str]]) -> list[TokenPair]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return [
        (
            [tokenizer.bos_token_id, *ids(row["prompt"])],
            [*ids(row["chosen"]), tokenizer.eos_token_id],
            [*ids(row["rejected"]), tokenizer.eos_token_id],
        )
        for row in rows
    ]


def as_batch(pairs: Sequence[TokenPair], first: int = 0) -> ExampleBatch:
    arrays = tuple(Example.pair(*(np.array(side, dtype=np.int32) for side in pair)) for pair in pairs)
    return ExampleBatch(np.arange(first, first + len(pairs)), arrays)


def policy_on(model_dir: Path, dtype: torch.dtype = torch.float32, **optimizer: float) -> TrainEngine:
    settings = TrainingArgs(**{"learning_rate": 1e-3, **optimizer})
    return train_engine(load_model(str(model_dir), dtype=dtype), PaddedLayout(pad_id=0), dtype, settings)


def reference_on(model_dir: Path, dtype: torch.dtype = torch.float32) -> Engine:
    return infer_engine(load_model(str(model_dir), dtype=dtype), PaddedLayout(pad_id=0), dtype)


def micro_batches(pairs: Sequence[TokenPair], reference: Engine | None, size: int) -> list[MicroBatch]:
    batches = [as_batch(pairs[i : i + size], i) for i in range(0, len(pairs), size)]
    return [MicroBatch(batch, None if reference is None else reference.score(batch)) for batch in batches]


def objective_of(name: str, **parameters: float) -> Objective:
    return Objective(terms=((make_losses([name], parameters)[0], 1.0),))
