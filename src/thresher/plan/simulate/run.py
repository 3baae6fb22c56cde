"""Simulate ranks of an estimated run, each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from thresher.builders.memory import Memory, peak_memory
from thresher.data.store.cache import user_cache_dir
from thresher.engines.native.optimizers.registry import OPTIMIZERS
from thresher.errors import UserError
from thresher.plan.estimate import Estimate
from thresher.plan.simulate.fake_cuda import compile_guard
from thresher.plan.simulate.request import RankRequest, RankResult
from thresher.plan.step import MeshDim, step_flops, wire_bytes
from thresher.plan.workload import Rows, rows_of, sampled_steps, split_mismatched, sum_rows

PairSizes = tuple[int, ...]  # tokens of the prompt and each response


@dataclass(frozen=True)
class SimulatedRank:
    """A rank of a pipeline stage: what was counted, and what the closed forms give for the same micro-batches."""

    stage: str
    counted: RankResult
    memory: Memory
    wire_bytes: Mapping[MeshDim, float]
    flops: float  # of products outside of attention, which the simulation replaces


def simulate_stage(estimate: Estimate, stage: str, micro_batches: Sequence[Sequence[PairSizes]]) -> SimulatedRank:
    """Simulate the first rank of a stage of `estimate.processes`."""
    optim = estimate.process.training.optim
    if not OPTIMIZERS[optim].accepts_fake_tensors:
        raise UserError(
            f"the kernels of optim {optim} do not run on fake tensors; leave out --simulate, or simulate optim=adamw"
        )
    process, layout = replace(estimate.processes[stage], imbalance=1.0), estimate.parts.layout
    counted = _run(estimate, process.stage * (estimate.dims.num_processes // estimate.dims.pp), micro_batches)
    lengths = [np.array(sizes, dtype=np.uint32) for sizes in micro_batches]
    matched, mismatched = zip(*(split_mismatched(each, estimate.pairs.has_mismatched) for each in lengths), strict=True)
    rows = [rows_of(each, layout) for each in matched]
    largest, step = max(rows, key=lambda each: each.total), sum_rows(rows)
    others = [rows_of(each, layout) for each in mismatched if each is not None]
    scored = replace(sum_rows(others), attended=0) if others else None
    return SimulatedRank(
        stage,
        counted,
        peak_memory(process, largest.total, largest.scored, len(rows)),
        wire_bytes(process, step, len(rows), scored),
        step_flops(process, replace(step, attended=0), scored).total,
    )


def typical_micro_batches(estimate: Estimate) -> list[list[PairSizes]]:
    """Micro-batches of a simulated step: the longest and the median one, and more of these to fill a pipeline."""
    lengths, layout = estimate.pairs.lengths, estimate.parts.layout
    plan, batching = estimate.plan, estimate.batching
    found: list[tuple[Rows, list[PairSizes]]] = []
    most = 1
    for number in sampled_steps(plan, is_assumed=estimate.pairs.is_assumed):
        batches = batching.split(plan.pair_ids(number), 0, estimate.dims.num_data_ranks)
        most = max(most, len(batches))
        for ids in batches:
            sizes = [tuple(map(int, row)) for row in lengths[ids]]
            found.append((rows_of(lengths[ids], layout), sizes))
    found.sort(key=lambda each: each[0].total)
    median, longest = found[len(found) // 2][1], found[-1][1]
    count = min(most, estimate.dims.pp + 1)  # the first stage holds as many as there are stages, then gradients too
    return [longest, *[median] * (count - 1)]


def _run(estimate: Estimate, rank: int, micro_batches: Sequence[Sequence[PairSizes]]) -> RankResult:
    request = RankRequest(
        estimate.config.model_dump(mode="json", exclude_unset=True),
        rank,
        estimate.dims.num_processes,
        [[list(pair) for pair in sizes] for sizes in micro_batches],
        estimate.pairs_per_step,
        estimate.process.reference,
        int(estimate.cluster.gpu.memory),
    )
    guard = "" if torch.version.cuda else str(compile_guard(user_cache_dir() / "simulate"))
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / name for name in ("request", "result")]
        files[0].write_text(json.dumps(asdict(request)), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-m", "thresher.plan.simulate", guard, *map(str, files)]
        ended = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise UserError(
                f"the simulation of rank {rank} failed; plan without --simulate, and report this:\n"
                f"{ended.stderr[-2000:]}"
            )
        return RankResult.parse(json.loads(files[1].read_text(encoding="utf-8")))
