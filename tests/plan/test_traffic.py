"""The messages that plan predicts are those that a real step sends, byte for byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.strategies.communication import count_step_of_config
from tests.support.strategies.config_runs import config_of
from tests.support.strategies.parity import LAYOUTS, Case, micro_batching_of, objective_of
from thresher.builders.engines import trained_parts
from thresher.distributed.mesh import ParallelDims
from thresher.models.loading.load import DTYPES
from thresher.models.loading.load_sharded import build_without_weights
from thresher.plan.estimate import precision_of
from thresher.plan.model import ModelShape, Stage
from thresher.plan.traffic import Message, TrafficSettings, step_messages
from thresher.plan.workload import dummy_rows, step_of_rank
from thresher.strategies.accumulate import empty_metrics
from thresher.strategies.native.build import axis_sizes

LORA: dict[str, Any] = {"lora_rank": 4, "lora_target": ["all-linear"]}
ATTENTION_LORA: dict[str, Any] = {"lora_rank": 4, "lora_target": ["q_proj", "o_proj"]}
MLP_LORA: dict[str, Any] = {"lora_rank": 4, "lora_target": ["gate_proj", "down_proj"]}


@dataclass(frozen=True)
class Run:
    axes: dict[str, Any]
    layout: str = "shared"
    settings: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    num_ranks: int = 2

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items()) or "dp_shard"
        return "-".join([axes, self.layout, self.family, *map(str, self.settings.values())]).replace(" ", "_")

    @property
    def case_values(self) -> dict[str, str]:
        axes = str(self.axes or "dp_shard")
        return {"axes, layout": f"{axes}, {self.layout}", "settings": str(self.settings), "family": self.family}


SHARD: dict[str, int] = {}
REPLICATE, TP, CP, PP = {"dp_replicate": 2}, {"tp_size": 2}, {"cp_size": 2}, {"pp_size": 2}
RUNS = [
    *(Run(axes, layout) for axes in (SHARD, REPLICATE, TP, PP) for layout in ("shared", "padded")),
    *(Run(axes, layout, LORA) for axes in (SHARD, REPLICATE, TP, PP) for layout in ("shared", "padded")),
    *(Run(CP, layout, settings) for layout in ("shared", "packed") for settings in ({}, LORA)),
    *(Run(axes, "shared", ATTENTION_LORA) for axes in (TP, CP)),
    Run(TP, "shared", MLP_LORA),
    *(Run(axes, "shared", {"recompute": "full"}) for axes in (SHARD, TP, CP)),
    *(Run(TP, "shared", {"recompute": "full", **lora}) for lora in (LORA, ATTENTION_LORA)),
    Run(CP, "shared", {"recompute": "full", **ATTENTION_LORA}),
    *(Run(axes, "shared", {"recompute": "selective"}) for axes in (SHARD, TP, CP, PP)),
    *(Run(axes, "shared", {"recompute": "selective", **LORA}) for axes in (TP, CP)),
    Run(TP, "padded", {"recompute": "selective", "dtype": "bf16"}),
    Run(TP, "shared", {"recompute": "selective"}, "gemma2"),
    *(Run(axes, "shared", {"dtype": "bf16"}) for axes in (SHARD, REPLICATE, TP, CP, PP)),
    *(Run(axes, "padded", {"dtype": "bf16"}) for axes in (SHARD, TP)),
    Run(TP, "shared", {"dtype": "bf16", **LORA}),
    *(Run({"zero_stage": stage}) for stage in (1, 2)),
    *(Run(axes, family="qwen2") for axes in (SHARD, PP)),  # a tied embedding
    *(Run(axes, family="qwen3") for axes in (SHARD, TP)),  # norms within heads
    Run({"pp_size": 2, "virtual_pp_size": 2}),
    *(
        Run({"tp_size": 2, "sequence_parallel": True}, settings=settings, family=family)
        for settings, family in (
            ({}, "llama"),
            ({"recompute": "full"}, "llama"),
            ({"recompute": "selective"}, "llama"),
            ({"dtype": "bf16"}, "qwen3"),
        )
    ),
    Run({"reduce_dtype": "bf16"}, settings={"dtype": "bf16"}),
    Run({"pp_size": 2, "pp_dtype": "bf16"}, settings={"dtype": "bf16"}),
    *(Run({"pp_size": 2, "pp_schedule": "zero_bubble", "virtual_pp_size": size}) for size in (1, 2)),
    Run(SHARD, family="qwen2", settings={"dtype": "bf16"}),
    Run(REPLICATE, family="qwen3_moe"),
    *(Run(axes, family="gemma2") for axes in (SHARD, TP)),
]
COMBINED = [
    *(Run({"dp_replicate": 2, "zero_stage": stage}, num_ranks=4) for stage in (1, 3)),
    Run({"zero_stage": 1, "pp_size": 2}, num_ranks=4),
    Run({"tp_size": 2, "pp_size": 2, "sequence_parallel": True}, num_ranks=4),
    Run({"tp_size": 2, "sequence_parallel": True}, num_ranks=4),
    Run({"tp_size": 2}, num_ranks=4),
    Run({"cp_size": 2}, num_ranks=4),
    Run({"pp_size": 2}, num_ranks=4),
    Run({"pp_size": 2, "tp_size": 2}, num_ranks=4),
    Run({"pp_size": 4}, num_ranks=4),
    Run({"pp_size": 2}, settings={"dtype": "bf16"}, num_ranks=4),
    Run({"tp_size": 2}, settings={"dtype": "bf16", "recompute": "full"}, num_ranks=4),
    Run({"tp_size": 2, "sequence_parallel": True, "zero_stage": 1}, settings={"dtype": "bf16"}, num_ranks=4),
    Run({"pp_size": 2}, settings={"dtype": "bf16"}, family="qwen2", num_ranks=4),
]


def predicted(run: Run, model_dir, rank: int) -> list[Message]:
    config = config_of(model_dir, run.num_ranks, run.axes, **run.settings)
    args = config.actor_train.model_args
    model = build_without_weights(str(model_dir), dtype=DTYPES[args.master_dtype])
    strategy = config.actor_train.strategy_args.settings
    dims = axis_sizes(strategy, run.num_ranks)
    shape = ModelShape.of(trained_parts(args).apply(model, frozen_dtype=DTYPES[args.dtype]))
    stage = Stage.of(shape, dims, rank * dims.pp // run.num_ranks, strategy.virtual_pp_size)
    layout, case = LAYOUTS[run.layout], Case(ParallelDims(dp_replicate=dims.num_data_ranks), run.layout)
    data_rank = rank // (dims.cp * dims.tp) % dims.num_data_ranks
    steps = [
        step_of_rank(micro_batching_of(case), case.plan.pair_ids(1), layout, each, dims.num_data_ranks)
        for each in range(dims.num_data_ranks)
    ]
    own = steps[data_rank].micro_batches
    if dims.fsdp_size > 1:
        own += (dummy_rows(layout),) * (max(len(step.micro_batches) for step in steps) - len(own))
    settings = TrafficSettings(
        precision_of(args, strategy),
        packs_rows=layout.needs_pair_attention,
        zero_stage=strategy.zero_stage,
        splits_rows=strategy.sequence_parallel,
        has_zero_bubble=strategy.pp_schedule == "zero_bubble",
        recompute=run.settings.get("recompute", "off"),
        scores_reference="lora_rank" in run.settings,
        num_metrics=len(empty_metrics(objective_of("sigmoid"))),
        measures_entropy=True,
    )
    return step_messages(stage, own, dummy_rows(layout), settings)


def assert_equal_bytes(run: Run, model_dir, pool) -> None:
    counted = pool.run(count_with, model_dir, run)
    for rank, by_kind in enumerate(counted):
        expected: Counter[str] = Counter()
        for message in predicted(run, model_dir, rank):
            expected[message.kind] += message.payload_bytes
        assert by_kind == dict(expected), f"rank {rank}"


def count_with(model_dir, run: Run) -> dict[str, int]:
    return count_step_of_config(model_dir, run.axes, run.layout, **run.settings)


@pytest.mark.covered
@pytest.mark.distributed
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_step_sends_exactly_the_predicted_bytes(run, model_dir, pool_of):
    assert_equal_bytes(run, model_dir(run.family), pool_of(2))


@pytest.mark.covered
@pytest.mark.distributed
@pytest.mark.parametrize("run", COMBINED, ids=str)
def test_axes_together_send_exactly_the_predicted_bytes(run, model_dir, pool_of):
    assert_equal_bytes(run, model_dir(run.family), pool_of(4))
