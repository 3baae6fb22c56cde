"""Simulate ranks of an estimated run, each in a process of its own, and compare the counts with the formulas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from thresher.data.store.cache import user_cache_dir
from thresher.errors import UserError
from thresher.plan.elementwise import elementwise_bytes
from thresher.plan.estimate import Estimate
from thresher.plan.memory import Memory, peak_memory
from thresher.plan.simulate.fake_cuda import compile_guard
from thresher.plan.simulate.request import RankRequest, RankResult
from thresher.plan.traffic import Axis, Message, step_messages, wire_bytes
from thresher.plan.workload import Rows, dummy_rows, rows_of, sampled_steps

PairSizes = tuple[int, int, int]


@dataclass(frozen=True)
class SimulatedRank:
    """A rank of a pipeline stage: what was counted, and what the formulas give for the same micro-batches.

    elementwise: bytes that layers and LM head read and write beside their products.
    """

    stage: str
    counted: RankResult
    memory: Memory
    messages: list[Message]
    elementwise: float

    @property
    def wire_bytes(self) -> dict[Axis, tuple[float, float]]:
        """By axis: counted, by formula."""
        counted = [Message(e.axis, e.kind, e.payload, e.size) for e in self.counted.collectives]
        found, by_formula = wire_bytes(counted), wire_bytes(self.messages)
        return {axis: (found.get(axis, 0.0), by_formula.get(axis, 0.0)) for axis in found | by_formula}


def simulate_stage(
    estimate: Estimate, stage: str, index: int, micro_batches: Sequence[Sequence[PairSizes]]
) -> SimulatedRank:
    """Simulate the first rank of a stage."""
    rank = index * (estimate.dims.num_processes // estimate.dims.pp)
    counted = _run(estimate, rank, micro_batches)
    layout = estimate.parts.layout
    rows = [rows_of(np.array(sizes, dtype=np.uint32), layout) for sizes in micro_batches]
    settings = replace(estimate.memory_settings, micro_batches=len(rows))
    messages = step_messages(estimate.stage(index), rows, dummy_rows(layout), estimate.traffic_settings)
    memory = peak_memory(estimate.stage(index), max(rows, key=lambda each: each.total), settings)
    scores = estimate.reference_in_step is not None
    # a compiler needs values, so that nothing is compiled in a simulation
    moved = elementwise_bytes(estimate.stage(index), rows, settings, compiled="nothing", scores_reference=scores)
    return SimulatedRank(stage, counted, memory, messages, moved)


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
            sizes = [(int(p), int(c), int(r)) for p, c, r in lengths[ids]]
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
        estimate.reference_in_step,
        int(estimate.cluster.gpu.memory),
    )
    guard = "" if torch.version.cuda else str(compile_guard(user_cache_dir() / "simulate"))
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / name for name in ("request", "result")]
        files[0].write_text(json.dumps(asdict(request)), encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-m", "thresher.plan.simulate.rank", guard, *map(str, files)]
        ended = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise UserError(
                f"the simulation of rank {rank} failed; plan without --simulate, and report this:\n"
                f"{ended.stderr[-2000:]}"
            )
        return RankResult.parse(json.loads(files[1].read_text(encoding="utf-8")))
