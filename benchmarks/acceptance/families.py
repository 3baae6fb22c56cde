"""Parts that train tiny models of several families: a mixture of experts, a hybrid, and compiled layers."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from benchmarks.acceptance.report import Facts, Place, check
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import FAMILIES
from tests.support.tiny_run import build_run, noise_pairs
from thresher.models.optimizations import compile as compiled_layers

STEPS = 4
# on a CPU, Inductor needs a C++ compiler and ten seconds per family
COMPILED = {
    "cpu": ("lfm2",),
    "cuda": (
        "llama",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "qwen3_moe",
        "gpt_oss",
        "lfm2",
        "qwen3_5_text",
    ),
}
# of the logged loss: fp32 sums in another order, and bf16 rounds each product to 0.2 %
TOLERANCES = {"fp32": 1e-4, "bf16": 1e-2}


def families(place: Place) -> Facts:
    """Steps of a mixture of experts and of a hybrid in layout shared, against the same in layout padded."""
    facts: Facts = {}
    for family in ("qwen3_moe", "qwen3_5_text", "nemotron_h"):
        for dtype in ("fp32",) if place.device == "cpu" else ("fp32", "bf16"):
            shared, padded = (_losses(place, family, dtype, layout=layout) for layout in ("shared", "padded"))
            facts[f"{family} in {dtype}"] = _difference(
                f"{family} in {dtype}, shared and padded", shared, padded, dtype
            )
    return facts


def compiled(place: Place) -> Facts:
    """Steps with compiled layers against steps without; a part that the compiler cannot compile is a failure."""
    facts: Facts = {}
    for family in COMPILED[place.device]:
        dtype = "bf16" if family in ("qwen3_moe", "gpt_oss") else "fp32"  # grouped products in fp32 are a loop
        torch.compiler.reset()
        counters.clear()
        with _Warnings() as warnings:
            found = _losses(place, family, dtype, compiles=True)
        graphs = counters["stats"]["unique_graphs"]
        check(not warnings.messages, f"{family}: {warnings.messages}")
        check(graphs, f"{family}: nothing was compiled")
        error = _difference(f"{family}, compiled and not", found, _losses(place, family, dtype), dtype)
        facts[family] = {"graphs": graphs, "largest_difference": error}
    return facts


class _Warnings(logging.Handler):
    """What the code of compiled layers logs."""

    def __enter__(self) -> _Warnings:
        self.messages: list[str] = []
        compiled_layers.logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        compiled_layers.logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _difference(what: str, found: list[float], expected: list[float], dtype: str) -> float:
    error = max(abs(one - other) for one, other in zip(found, expected, strict=True))
    check(error < TOLERANCES[dtype], f"{what}: losses differ by {error:.2e}: {found}, {expected}")
    check(len(set(found)) == STEPS, f"{what}: the loss does not move: {found}")
    return error


def _losses(place: Place, family: str, dtype: str, *, layout: str = "shared", compiles: bool = False) -> list[float]:
    directory = place.directory / family
    if not directory.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(copy.deepcopy({**FAMILIES, **STATEFUL}[family])).save_pretrained(directory)
    training: dict[str, Any] = {"per_device_train_batch_size": 2, "global_batch_size": 8, "learning_rate": 1e-3}
    values = {
        "pretrain": str(directory),
        "output_dir": str(directory / "out"),
        "max_steps": STEPS,
        "layout": layout,
        "sequence_length": 64,
        "actor_train": {
            "data_args": {"file_name": "in memory"},
            "training_args": training | {"torch_compile": compiles},
            "model_args": {"dtype": dtype},
        },
    }
    trainer = build_run(values, noise_pairs(8 * STEPS)).trainer
    return [trainer.training_step()["loss"].mean for _ in range(STEPS)]
