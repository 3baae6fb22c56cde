"""Steps, scores and checks of a pipeline on the ranks of a pool, and the same in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.support.engines.parity import (
    CPU,
    LAYOUTS,
    LEARNING_RATE,
    PAIRS,
    Case,
    gather_full,
    objective_of,
)
from thresher.config.roles import TrainingArgs
from thresher.data.example import ExampleBatch
from thresher.distributed.mesh import Mesh, ParallelDims
from thresher.engines.accumulate import MicroBatch, TokenCounts
from thresher.engines.engine import TrainEngine
from thresher.engines.native import pipeline_executor
from thresher.engines.native.build import infer_engine, train_engine
from thresher.engines.native.parallelize import ParallelContext, parallelize
from thresher.errors import UserError
from thresher.losses.pairs import ExampleLogps, TokenStatistics
from thresher.models.layouts import ModelInputs, PackedLayout
from thresher.models.loading.load import load_model
from thresher.models.loading.load_sharded import build_on_meta

OPTIMIZER = TrainingArgs(learning_rate=LEARNING_RATE, adam_epsilon=1e-5, max_grad_norm=1.0)


@dataclass(frozen=True)
class OneStep:
    metrics: dict[str, float]
    grad_norm: float
    tokens: TokenCounts
    weights: dict[str, Tensor]


def policy_of(case: Case, path: Path, mesh: Mesh | None) -> TrainEngine:
    """A policy on a mesh, or in this process alone."""
    if mesh is None:
        model, parallel = load_model(str(path)), ParallelContext()
    else:
        model = build_on_meta(str(path), dtype=torch.float32)
        parallel = parallelize(model, str(path), mesh, case.settings, case.dtype, CPU)
    return train_engine(model, LAYOUTS[case.layout], case.dtype, OPTIMIZER, parallel)


def weights_of(policy: TrainEngine) -> dict[str, Tensor]:
    return {name: gather_full(weight) for name, weight in policy.weights().items()}


def one_step(case: Case, path: Path, assignments: Sequence[Sequence[Sequence[int]]]) -> OneStep:
    """Make one step; assignments are the pair ids of each micro-batch of each data rank."""
    mesh = None if case.sizes == ParallelDims() else Mesh.create(case.sizes, CPU)
    policy = policy_of(case, path, mesh)
    micro_batches = [MicroBatch(batch_of(ids), None) for ids in assignments[policy.dp_group.rank]]
    num_pairs = sum(len(ids) for assignment in assignments for ids in assignment)
    outcome = policy.train_step(
        micro_batches, objective_of(case.loss), num_pairs_in_step=num_pairs, learning_rate=LEARNING_RATE
    )
    metrics = {name: metric.mean for name, metric in outcome.metrics.items()}
    return OneStep(metrics, outcome.grad_norm, outcome.tokens, weights_of(policy))


def max_held_inputs(case: Case, path: Path, num_micro_batches: int) -> int:
    """The maximum number of micro-batches whose received hidden states this stage held at the same time."""
    held: list[int] = []
    allocate = pipeline_executor._RaggedStage._allocate_recv_buffers

    def counting(stage, expected, number):
        allocate(stage, expected, number)
        # torch 2.15 allocates from the metadata
        assert all(one.tensor_meta.shape == one.buffer.shape for one in expected if one.buffer is not None)
        buffers = [one.buffer for received in stage.args_recv_info.values() for one in received]
        held.append(sum(buffer is not None and buffer.numel() > 0 for buffer in buffers))

    pipeline_executor._RaggedStage._allocate_recv_buffers = counting
    try:
        one_step(case, path, [[[number] for number in range(num_micro_batches)]])
    finally:
        pipeline_executor._RaggedStage._allocate_recv_buffers = allocate
    return max(held)


def batch_of(ids: Sequence[int]) -> ExampleBatch:
    return ExampleBatch(np.array(ids, dtype=np.int64), tuple(PAIRS[i] for i in ids))


def score(case: Case, path: Path, batches: Sequence[Sequence[int]]) -> list[ExampleLogps]:
    policy = policy_of(case, path, None if case.sizes == ParallelDims() else Mesh.create(case.sizes, CPU))
    return [policy.score(batch_of(ids), statistics=TokenStatistics(True, True)) for ids in batches]


def check_logps(case: Case, path: Path, has_wrong_positions: bool) -> str | None:
    """The error of the start-up check, for a correct layout or one with wrong positions."""
    mesh = Mesh.create(case.sizes, CPU)
    model = build_on_meta(str(path), dtype=torch.float32, is_reward_model=case.is_reward_model)
    parallel = parallelize(model, str(path), mesh, case.settings, case.dtype, CPU)
    layout = _Stretched(shares_prompt=True, scored=case.rows.scored) if has_wrong_positions else case.rows
    try:
        infer_engine(model, layout, case.dtype, parallel).check_logps(batch_of([0, 1, 2]))
    except UserError as error:
        return str(error)
    return None


class _Stretched(PackedLayout):
    """Doubles every position."""

    def collate(self, batch: ExampleBatch) -> ModelInputs:
        inputs = super().collate(batch)
        inputs.model_inputs["position_ids"] *= 2
        return inputs
