"""Runs of large models whose mesh `thresher plan` proposes, for the tests of the search and of the simulation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.published_models import save_config
from thresher.builders.hardware import GPUS
from thresher.config import DPOConfig, parse_config
from thresher.plan.estimate import Estimate, estimate_run
from thresher.plan.search import Proposal, search_meshes

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class PlannedRun:
    """A model on H100 GPUs with 80 GB each."""

    model: str
    num_gpus: int
    pairs_per_step: int
    is_lora: bool

    def __str__(self) -> str:
        return f"{self.model}-on-{self.num_gpus}-{'lora' if self.is_lora else 'full'}"


PLANNED_RUNS = [
    PlannedRun(model, num_gpus, pairs, is_lora)
    for model, num_gpus, pairs in (
        ("Llama-3-8B", 8, 64),
        ("Llama-3-70B", 64, 256),
        ("Llama-3.1-405B", 1024, 1024),
    )
    for is_lora in (False, True)
]


def config_without_mesh(run: PlannedRun, directory: Path) -> DPOConfig:
    """Pairs of 2,048 tokens, assumed; directory: for the config.json of the model."""
    model_args: dict[str, Any] = {"dtype": "bf16", **({"lora_rank": 16} if run.is_lora else {})}
    return parse_config(
        {
            "pretrain": str(save_config(directory / run.model, run.model)),
            "sequence_length": 2048,
            "max_steps": 100,
            "actor_train": {
                "num_workers": run.num_gpus,
                "model_args": model_args,
                "data_args": {"file_name": str(directory / "absent.jsonl"), "template": "raw"},
                "training_args": {"global_batch_size": run.pairs_per_step},
            },
        }
    )


def estimate_of(run: PlannedRun, directory: Path) -> Estimate:
    return estimate_run(config_without_mesh(run, directory), GPUS["h100"], run.num_gpus // GPUS_PER_NODE, GPUS_PER_NODE)


def proposed(run: PlannedRun, directory: Path) -> Proposal:
    """The mesh that plan proposes for a run; its estimate has the config."""
    return search_meshes(estimate_of(run, directory))[0]
