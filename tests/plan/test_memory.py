"""The memory that plan predicts, against the tensors that are alive in a real step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.strategies.config_runs import config_of
from tests.support.strategies.live_memory import StepBytes, live_bytes_of_step, pairs_of
from tests.support.strategies.parity import LAYOUTS
from thresher.builders.engines import trained_parts
from thresher.models.loading.load import DTYPES
from thresher.models.loading.load_sharded import build_without_weights
from thresher.plan.activations import MemorySettings
from thresher.plan.estimate import precision_of
from thresher.plan.memory import Memory, peak_memory, persistent_memory
from thresher.plan.model import ModelShape, Stage
from thresher.plan.workload import rows_of
from thresher.strategies.native.build import axis_sizes

pytestmark = pytest.mark.distributed

PAIRS = pairs_of(4, prompt=100, response=80)
LENGTHS = np.array([[len(p.prompt_ids), len(p.chosen_ids), len(p.rejected_ids)] for p in PAIRS], dtype=np.uint32)
SHAPES = {
    "grouped": {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_key_value_heads": 4},
    "wide": {"vocab_size": 700, "hidden_size": 192, "intermediate_size": 256, "num_key_value_heads": 8},
    # the peak of a step of one micro-batch is at its end, in the backward of the embedding
    "vocabulary": {"vocab_size": 24000, "hidden_size": 128, "intermediate_size": 384, "num_key_value_heads": 4},
}
LORA: dict[str, Any] = {"lora_rank": 4, "lora_target": ["all-linear"]}


@dataclass(frozen=True)
class Run:
    axes: dict[str, int]
    layout: str = "shared"
    settings: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 2
    shape: str = "grouped"
    num_batches: int = 2

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items()) or f"dp_shard {self.num_ranks}"
        words = [axes, self.layout, self.shape, str(self.num_batches), *map(str, self.settings.values())]
        return "-".join(words).replace(" ", "_")

    @property
    def case_values(self) -> dict[str, str]:
        axes = f"{self.axes or 'dp_shard'} on {self.num_ranks}"
        return {
            "axes": axes,
            "layout": self.layout,
            "settings": str(self.settings),
            "shape": self.shape,
            "micro-batches": str(self.num_batches),
        }

    @property
    def num_processes(self) -> int:
        return self.num_ranks


RUNS = [
    *(Run(axes, shape="vocabulary", num_batches=1) for axes in ({}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2})),
    *(Run({}, shape="vocabulary", num_batches=1, num_ranks=1, settings=settings) for settings in ({}, LORA)),
    *(Run(axes, num_batches=1) for axes in ({}, {"tp_size": 2})),
    Run({"zero_stage": 1}, shape="vocabulary", num_batches=1, settings={"dtype": "bf16", "recompute": "full"}),
    *(Run({}, num_ranks=1, settings=settings) for settings in ({}, LORA, {"dtype": "bf16"}, {"recompute": "full"})),
    *(Run(axes) for axes in ({}, {"dp_replicate": 2}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2})),
    *(Run(axes, "padded") for axes in ({}, {"tp_size": 2}, {"pp_size": 2})),
    *(Run(axes, settings=LORA) for axes in ({}, {"tp_size": 2}, {"pp_size": 2})),
    *(Run(axes, settings={"dtype": "bf16"}) for axes in ({}, {"zero_stage": 2}, {"zero_stage": 1})),
    *(
        Run({"tp_size": 2, "sequence_parallel": True}, settings={"dtype": "bf16", "recompute": recompute})
        for recompute in ("off", "selective", "full")
    ),
    Run({}, settings={"dtype": "bf16", **LORA}),
    Run({}, settings={"recompute": "full"}),
    Run({}, num_ranks=1, settings={"recompute": "selective"}),
    *(Run(axes, settings={"recompute": "selective"}) for axes in ({}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2})),
    *(Run({}, settings={"dtype": "bf16", "recompute": "selective", **lora}) for lora in ({}, LORA)),
    Run({}, "padded", settings={"recompute": "selective"}),
    *(Run(axes, shape="wide") for axes in ({}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2})),
    Run({}, "packed", shape="wide", settings={"dtype": "bf16"}),
    Run({}, "padded", shape="wide", settings=LORA),
    Run({}, num_ranks=1, settings={"dtype": "bf16", **LORA}),
    Run({"pp_size": 2}, num_batches=8),
    *(Run({"pp_size": 2, "virtual_pp_size": 3}, num_batches=number) for number in (4, 8)),
    Run({"pp_size": 4}, num_ranks=4, num_batches=6),
    Run({"pp_size": 2}, num_ranks=4, num_batches=5, settings={"dtype": "bf16"}),
    *(Run(axes, num_ranks=4, settings={"dtype": "bf16", "recompute": "full"}) for axes in ({}, {"tp_size": 2})),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, sizes in SHAPES.items():
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, num_hidden_layers=6, num_attention_heads=8, max_position_embeddings=512)
        LlamaForCausalLM(config).save_pretrained(root / name)
    return root


def predicted(run: Run, model_dir, rank: int) -> tuple[Memory, Memory]:
    """Persistent memory, and the peak of a step."""
    config = config_of(model_dir, run.num_ranks, run.axes, **run.settings)
    role, args = config.actor_train, config.actor_train.model_args
    dims = axis_sizes(role.strategy_args.settings, run.num_ranks)
    model = build_without_weights(str(model_dir), dtype=DTYPES[args.master_dtype])
    shape = ModelShape.of(trained_parts(args).apply(model, frozen_dtype=DTYPES[args.dtype]))
    stage = Stage.of(shape, dims, rank * dims.pp // run.num_ranks, role.strategy_args.settings.virtual_pp_size)
    layout = LAYOUTS[run.layout]
    settings = MemorySettings(
        precision_of(args, role.strategy_args.settings),
        layout.needs_pair_attention,
        zero_stage=role.strategy_args.settings.zero_stage,
        splits_rows=role.strategy_args.settings.sequence_parallel,
        recompute=role.training_args.gradient_checkpointing,
        micro_batches=run.num_batches,
        on_gpu=False,
        has_zero_bubble=role.strategy_args.settings.pp_schedule == "zero_bubble",
    )
    return persistent_memory(stage, settings), peak_memory(stage, rows_of(LENGTHS, layout), settings)


def count_with(model_dir, run: Run) -> StepBytes:
    return live_bytes_of_step(model_dir, run.axes, run.layout, PAIRS, run.num_batches, **run.settings)


@pytest.mark.covered
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_step_holds_the_predicted_memory(run, models, pool_of):
    model_dir = models / run.shape

    for rank, counted in enumerate(pool_of(run.num_ranks).run(count_with, model_dir, run)):
        held, peak = predicted(run, model_dir, rank)
        print(f"{run} rank {rank}: {counted.peak:,} counted, {peak.total / counted.peak - 1:+.1%} predicted")
        assert counted.weights == held.weights
        assert counted.gradients == held.gradients
        assert counted.optimizer == held.optimizer
        assert peak.total == pytest.approx(counted.peak, rel=0.1)
