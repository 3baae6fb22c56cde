"""Weights of single tokens: a token of weight 0 trains as one that the loss mask leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.compared_runs import merge
from tests.support.small_runs import last_weights, make_base
from tests.support.tiny_llama import VOCAB
from thresher.config import parse_config
from thresher.errors import UserError
from thresher.pipeline import DPOPipeline


def write_tokenized(directory: Path, count: int, seed: int) -> None:
    """Write the same pairs twice: with tokens of weight 0, and with a loss mask that leaves them out."""
    draw = np.random.default_rng(seed)
    weighted, masked = [], []
    for _ in range(count):
        prompt = draw.integers(4, VOCAB, draw.integers(2, 5)).tolist()
        row: dict[str, Any] = {}
        weights = {}
        for side in ("chosen", "rejected"):
            answer = draw.integers(4, VOCAB, draw.integers(2, 9)).tolist()
            kept = [*(draw.random(len(answer) - 1) < 0.6).astype(int).tolist(), 1]
            kept[0] = 1  # what precedes the first scored token is the prompt
            row[f"{side}_input_ids"] = [*prompt, *answer]
            row[f"{side}_loss_mask"] = [0] * len(prompt) + [1] * len(answer)
            weights[f"{side}_token_weights"] = [0] * len(prompt) + kept
        weighted.append({**row, **weights})
        masked.append(row | {f"{side}_loss_mask": weights[f"{side}_token_weights"] for side in ("chosen", "rejected")})
    for name, rows in (("weighted", weighted), ("masked", masked)):
        (directory / f"{name}-{seed}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("token_weights")
    values = make_base(directory)
    for count, seed in ((21, 0), (3, 1)):
        write_tokenized(directory, count, seed)
    return values


def on(base: dict[str, Any], name: str) -> dict[str, Any]:
    directory = Path(base["pretrain"]).parent
    files = (str(directory / f"{name}-{seed}.jsonl") for seed in (0, 1))
    train, validation = ({"data_args": {"file_name": file}} for file in files)
    return merge(base, {"actor_train": train, "validation": validation})


@pytest.mark.parametrize(("layout", "loss"), [("padded", "sigmoid"), ("packed", "aot"), ("shared", "sigmoid")])
def test_a_weight_of_zero_trains_as_a_mask(base: dict[str, Any], tmp_path: Path, layout: str, loss: str) -> None:
    for name in ("weighted", "masked"):
        changes = {"output_dir": str(tmp_path / name), "layout": layout, "pref_loss": loss}
        DPOPipeline(parse_config(merge(on(base, name), changes))).run()
    weighted, masked = last_weights(tmp_path / "weighted"), last_weights(tmp_path / "masked")
    start = load_file(Path(base["pretrain"]) / "model.safetensors")
    for name, weight in weighted.items():
        torch.testing.assert_close(weight, masked[name], atol=1e-6, rtol=0, msg=name)
    assert any((weight - start[name]).abs().max() > 1e-3 for name, weight in weighted.items() if name in start)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pref_loss": "bradley_terry"}, "the data has token weights, but a reward model scores whole responses"),
        ({"apply_loss_mask": False}, "the data has token weights, which apply_loss_mask=false would ignore"),
    ],
)
def test_settings_that_would_ignore_token_weights_are_refused(base, tmp_path, changes, message) -> None:
    with pytest.raises(UserError, match=message):
        DPOPipeline(parse_config(merge(on(base, "weighted"), {"output_dir": str(tmp_path), **changes}))).run()
