"""Compute memory per GPU and GPUs needed by method and size of the model: the table of docs/scale/memory.md.

python -m benchmarks.plan_table
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1")

from tests.support.published_models import save_config
from thresher.builders.hardware import GPUS
from thresher.config import parse_config
from thresher.plan.estimate import Estimate
from thresher.plan.step import Cluster

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-3B", "Llama-3-8B", "Qwen2.5-32B", "Llama-3-70B")
METHODS: dict[str, dict[str, Any]] = {
    "full, DPO, precomputed reference": {"reference": {"mode": "precompute"}},
    "full, DPO, reference in the same workers": {"reference": {"mode": "concurrent"}},
    "full, SimPO or ORPO (no reference)": {"pref_loss": "simpo"},
    "LoRA rank 16, DPO": {"lora_rank": 16},
    "QLoRA rank 16 (nf4), DPO": {"lora_rank": 16, "quantization": {"bits": 4}},
}
MOST_GPUS = 256


def estimate(directory: Path, model: str, changes: dict[str, Any]) -> Estimate:
    """bf16, gradient checkpointing, micro-batches of 4,096 tokens, pairs of 2,048 tokens, FSDP2 over all GPUs."""
    values = dict(changes)
    lora = {key: values.pop(key) for key in ("lora_rank", "quantization") if key in values}
    config = parse_config(
        {
            **values,
            "pretrain": str(save_config(directory / model, model)),
            "sequence_length": 2048,
            "max_steps": 1,
            "actor_train": {
                "model_args": {"dtype": "bf16", **lora},
                "data_args": {"file_name": str(directory / "absent.jsonl"), "template": "raw"},
                "training_args": {
                    "global_batch_size": MOST_GPUS,
                    "gradient_checkpointing": True,
                    "max_tokens_per_micro_batch": 4096,
                },
            },
        }
    )
    return Estimate(config, Cluster(GPUS["h100"], gpus_per_node=8, num_gpus=1))


def fewest_gpus(first: Estimate) -> Estimate:
    """The same run on the smallest power of two of GPUs that it fits on."""
    found = first
    while not found.fits and found.cluster.num_gpus < MOST_GPUS:
        more = replace(found.cluster, num_gpus=2 * found.cluster.num_gpus)
        found = first.but(cluster=more)
    return found


def rows() -> Iterator[str]:
    """The table in Markdown."""
    yield "| method | " + " | ".join(model for model in MODELS) + " |"
    yield "|---|" + "---|" * len(MODELS)
    with tempfile.TemporaryDirectory() as directory:
        for method, changes in METHODS.items():
            found = [fewest_gpus(estimate(Path(directory), model, changes)) for model in MODELS]
            cells = [f"{each.peak / 1e9:.1f} GB x {each.cluster.num_gpus}" for each in found]
            yield f"| {method} | " + " | ".join(cells) + " |"


def main() -> None:
    for row in rows():
        print(row)


if __name__ == "__main__":
    main()
