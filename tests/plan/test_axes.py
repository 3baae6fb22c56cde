"""The search over axes: what it proposes fits, and no neighbour of it is faster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest

from tests.support.planned_runs import PLANNED_RUNS, PlannedRun, config_without_axes, estimate_of
from tests.support.published_models import NUM_PARAMETERS
from tests.support.small_runs import write_rows
from thresher.config import parse_config
from thresher.distributed.mesh import AXES, ParallelDims
from thresher.errors import UserError
from thresher.plan.axes import WORTHWHILE, cheaper_layouts, possible_axes, search_axes
from thresher.plan.estimate import Estimate
from thresher.plan.hardware import GPUS
from thresher.plan.model import Stage
from thresher.plan.search import estimate_run, with_settings
from thresher.plan.traffic import step_messages, wire_bytes
from thresher.plan.workload import dummy_rows

BUDGETS = (2048, 4096, 8192, 16384, 32768)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def searched(directory):
    """The estimate of a run without axes, and all layouts that the search finds."""

    @cache
    def find(run: PlannedRun):
        estimate = estimate_of(run, directory)
        return estimate, search_axes(estimate)

    return find


def neighbours(dims: ParallelDims) -> Iterator[ParallelDims]:
    """One size doubled, and another one halved."""
    for up, down in permutations(AXES, 2):
        if getattr(dims, down) % 2 == 0:
            yield replace(dims, **{up: 2 * getattr(dims, up), down: getattr(dims, down) // 2})


def times_of(estimate: Estimate, dims: ParallelDims) -> Iterator[float]:
    """Of all settings of a layout that fit, with no shortcut."""
    recomputations = ("off", "selective", "full")
    for recompute, zero_stage, splits, budget in product(recomputations, (1, 2, 3), (False, True), BUDGETS):
        if splits and (dims.tp == 1 or not estimate.allows_sequence_parallel):
            continue
        strategy = {"pp_size": dims.pp, "dp_replicate": dims.dp_replicate, "cp_size": dims.cp, "tp_size": dims.tp}
        strategy["sequence_parallel"] = splits
        training = {"gradient_checkpointing": recompute, "max_tokens_per_micro_batch": budget}
        try:
            other = with_settings(
                estimate, strategy=strategy | {"zero_stage": zero_stage}, training=training, is_condensed=True
            )
        except UserError:
            continue
        if other.fits:
            yield other.mean_seconds


# CI searches the axes of the smaller model, without the minutes that all neighbours of a large one take
@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[pytest.mark.hand] if run.num_gpus > 8 else []) for run in PLANNED_RUNS],
    ids=str,
)
def test_the_proposed_axes_fit_and_no_neighbour_is_faster(run, searched):
    estimate, found = searched(run)
    best = found[0].estimate
    full = Estimate(best.config, best.cluster, estimate)

    assert estimate.shape.num_parameters >= NUM_PARAMETERS[run.model]
    assert full.fits
    assert full.pairs_per_step == run.pairs_per_step
    assert best.dims.num_processes == run.num_gpus
    compared = 0
    for dims in neighbours(best.dims):
        for seconds in times_of(estimate, dims):
            compared += 1
            assert seconds >= best.mean_seconds, dims
    print(
        f"{run}: {best.dims}, zero_stage {best.settings.zero_stage}, "
        f"sequence_parallel {best.settings.sequence_parallel}, recompute {best.recompute}, "
        f"{best.token_budget} tokens, {best.mean_seconds:.2f} s, {best.peak / 1e9:.1f} GB, {compared} neighbours"
    )
    assert compared


def test_layouts_divide_the_gpus_and_keep_tp_and_cp_within_a_node(searched):
    estimate, found = searched(PLANNED_RUNS[2])
    layouts = [proposal.estimate.dims for proposal in found]
    assert len(layouts) == len(set(layouts)) > 10
    for dims in possible_axes(estimate):
        assert dims.num_processes == 64
        assert dims.tp * dims.cp <= 8


def test_a_condensed_step_takes_the_time_of_the_sampled_ones(directory):
    """Up to the rounding of rows, and the difference between the median step by rows and by time."""
    config = config_without_axes(PLANNED_RUNS[0], directory)
    estimate = estimate_run(config, GPUS["h100"])
    draw = np.random.default_rng(0)
    lengths = draw.lognormal(5, 0.8, (4096, 3)).clip(1, 2000).astype(np.uint32)
    estimate.__dict__["pairs"] = replace(estimate.pairs, lengths=lengths, is_assumed=False)

    for pp, tp in ((1, 1), (2, 2)):
        axes = {"pp_size": pp, "tp_size": tp}
        exact, condensed = (with_settings(estimate, strategy=axes, is_condensed=quick) for quick in (False, True))
        assert condensed.peak == exact.peak
        assert condensed.mean_seconds == pytest.approx(exact.mean_seconds, rel=0.01)


def test_layers_of_a_kind_are_counted_together_and_change_no_byte(directory):
    """The oracle has every layer counted alone; the first two layers are frozen."""
    config = config_without_axes(PLANNED_RUNS[0], directory)
    role = config.actor_train
    frozen = role.model_args.model_copy(
        update={"freeze_module_prefix": ["model.embed_tokens", "model.layers.0.", "model.layers.1."]}
    )
    config = config.model_copy(update={"actor_train": role.model_copy(update={"model_args": frozen})})
    grouped = estimate_run(config, GPUS["h100"])
    alone = estimate_run(config, GPUS["h100"])
    alone.shape.__dict__["kinds"] = list(range(alone.shape.num_layers))
    rows = grouped.workload.largest

    for dims in (ParallelDims(dp_shard=4, tp=2), ParallelDims(pp=2, cp=2, tp=2), ParallelDims(dp_shard=8)):
        one, other = Stage.of(grouped.shape, dims), Stage.of(alone.shape, dims)
        assert len(one.layer_counts) < len(other.layer_counts) == len(other.layers)
        assert one.held == other.held
        sent = [
            wire_bytes(step_messages(stage, [rows, rows], dummy_rows(grouped.parts.layout), grouped.traffic_settings))
            for stage in (one, other)
        ]
        assert sent[0] == pytest.approx(sent[1])


def test_a_layout_that_cannot_accumulate_the_same_pairs_sets_the_global_batch(tmp_path, directory):
    """5 pairs per rank on 4 data-parallel ranks are 20 pairs, which 8 ranks cannot make from multiples of 5."""
    values = {
        "pretrain": config_without_axes(PLANNED_RUNS[0], directory).pretrain,
        "actor_train": {
            "num_workers": 8,
            "model_args": {"dtype": "bf16"},
            "data_args": {"file_name": str(write_rows(tmp_path / "pairs.jsonl", 100, 0)), "template": "raw"},
            "training_args": {"per_device_train_batch_size": 5},
            "strategy_args": {"strategy_config": {"tp_size": 2}},
        },
    }
    estimate = estimate_run(parse_config(values), GPUS["h100"])

    by_axes = {proposal.estimate.dims: proposal for proposal in search_axes(estimate)}

    training = "actor_train.training_args"
    eight = by_axes[ParallelDims(dp_shard=8)]
    assert eight.changes[f"{training}.global_batch_size"] == 20
    two = by_axes[ParallelDims(dp_shard=2, tp=4)]
    assert two.changes[f"{training}.gradient_accumulation_steps"] == 2
    assert all(proposal.estimate.pairs_per_step == 20 for proposal in by_axes.values())


def test_only_layouts_worth_a_change_are_proposed(searched):
    estimate, found = searched(PLANNED_RUNS[0])
    proposals = cheaper_layouts(estimate)

    assert len(proposals) <= 3
    limit = (1 - WORTHWHILE) * with_settings(estimate, is_condensed=True).mean_seconds
    faster = [each for each in found if each.estimate.mean_seconds < limit]
    assert [each.changes for each in proposals] == [each.changes for each in faster[:3]]
    best = Estimate(found[0].estimate.config, estimate.cluster, estimate)
    assert cheaper_layouts(best) == []


def test_overrides_are_json_values(searched):
    _, found = searched(PLANNED_RUNS[0])
    for override in found[0].overrides:
        key, _, value = override.partition("=")
        assert found[0].changes[key] == json.loads(value)
