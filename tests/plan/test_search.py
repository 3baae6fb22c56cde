"""The search over meshes: what it proposes fits, and no neighbour of it is faster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from pathlib import Path

import pytest

from tests.support.planned_runs import PLANNED_RUNS, PlannedRun, config_without_mesh, estimate_of
from tests.support.published_models import NUM_PARAMETERS
from tests.support.small_runs import write_rows
from thresher.builders.hardware import GPUS
from thresher.config import parse_config
from thresher.distributed.mesh import MESH_DIMS, ParallelDims
from thresher.errors import UserError
from thresher.plan.estimate import Estimate, KnownRun, estimate_run
from thresher.plan.search import WORTHWHILE, cheaper_meshes, possible_meshes, search_meshes

BUDGETS = (2048, 4096, 8192, 16384, 32768)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def searched(directory):
    """The estimate of a run without a mesh, and all meshes that the search finds."""

    @cache
    def find(run: PlannedRun):
        estimate = estimate_of(run, directory)
        return estimate, search_meshes(estimate)

    return find


def neighbours(dims: ParallelDims) -> Iterator[ParallelDims]:
    """One size doubled, and another one halved."""
    for up, down in permutations(MESH_DIMS, 2):
        if getattr(dims, down) % 2 == 0:
            yield replace(dims, **{up: 2 * getattr(dims, up), down: getattr(dims, down) // 2})


def times_of(estimate: Estimate, dims: ParallelDims) -> Iterator[float]:
    """Of all settings of a mesh that fit, with no shortcut."""
    recomputations = ("off", "selective", "full")
    for recompute, zero_stage, splits, budget in product(recomputations, (1, 2, 3), (False, True), BUDGETS):
        if splits and (dims.tp == 1 or not estimate.allows_sequence_parallel):
            continue
        strategy = {"pp_size": dims.pp, "dp_replicate": dims.dp_replicate, "cp_size": dims.cp, "tp_size": dims.tp}
        strategy["sequence_parallel"] = splits
        training = {"gradient_checkpointing": recompute, "max_tokens_per_micro_batch": budget}
        try:
            other = estimate.but(strategy=strategy | {"zero_stage": zero_stage}, training=training)
        except UserError:
            continue
        if other.fits:
            yield other.step_seconds


# CI searches the meshes of the smaller model, without the minutes that all neighbours of a large one take
@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[pytest.mark.hand] if run.num_gpus > 8 else []) for run in PLANNED_RUNS],
    ids=str,
)
def test_the_proposed_mesh_fits_and_no_neighbour_is_faster(run, searched):
    estimate, found = searched(run)
    best = found[0].estimate

    assert estimate.known.size.parameters.total >= NUM_PARAMETERS[run.model]
    assert best.fits
    assert best.pairs_per_step == run.pairs_per_step
    assert best.dims.num_processes == run.num_gpus
    compared = 0
    for dims in neighbours(best.dims):
        for seconds in times_of(estimate, dims):
            compared += 1
            assert seconds >= best.step_seconds, dims
    print(
        f"{run}: {best.dims}, zero_stage {best.settings.zero_stage}, "
        f"sequence_parallel {best.settings.sequence_parallel}, recompute {best.process.recompute}, "
        f"{best.token_budget} tokens, {best.step_seconds:.2f} s, {best.peak / 1e9:.1f} GB, {compared} neighbours"
    )
    assert compared


def test_meshes_divide_the_gpus_and_keep_tp_and_cp_within_a_node(searched):
    estimate, found = searched(PLANNED_RUNS[2])
    meshes = [proposal.estimate.dims for proposal in found]
    assert len(meshes) == len(set(meshes)) > 10
    for dims in possible_meshes(estimate):
        assert dims.num_processes == 64
        assert dims.tp * dims.cp <= 8


def test_a_plan_counts_the_trained_parameters_of_frozen_layers(directory):
    """The first two layers and the embedding are frozen."""
    config = config_without_mesh(PLANNED_RUNS[0], directory)
    role = config.actor_train
    frozen = role.model_args.model_copy(
        update={"freeze_module_prefix": ["model.embed_tokens", "model.layers.0.", "model.layers.1."]}
    )
    config = config.model_copy(update={"actor_train": role.model_copy(update={"model_args": frozen})})

    parameters = KnownRun(config).size.parameters

    layer = 218_103_808 + 2 * 4096
    assert parameters.trained == parameters.total - 2 * layer - 128256 * 4096


def test_a_mesh_that_cannot_accumulate_the_same_pairs_sets_the_global_batch(tmp_path, directory):
    """5 pairs per rank on 4 data-parallel ranks are 20 pairs, which 8 ranks cannot make from multiples of 5."""
    values = {
        "pretrain": config_without_mesh(PLANNED_RUNS[0], directory).pretrain,
        "actor_train": {
            "num_workers": 8,
            "model_args": {"dtype": "bf16"},
            "data_args": {"file_name": str(write_rows(tmp_path / "pairs.jsonl", 100, 0)), "template": "raw"},
            "training_args": {"per_device_train_batch_size": 5},
            "strategy_args": {"strategy_config": {"tp_size": 2}},
        },
    }
    estimate = estimate_run(parse_config(values), GPUS["h100"])

    by_mesh = {proposal.estimate.dims: proposal for proposal in search_meshes(estimate)}

    training = "actor_train.training_args"
    eight = by_mesh[ParallelDims(dp_shard=8)]
    assert eight.changes[f"{training}.global_batch_size"] == 20
    two = by_mesh[ParallelDims(dp_shard=2, tp=4)]
    assert two.changes[f"{training}.gradient_accumulation_steps"] == 2
    assert all(proposal.estimate.pairs_per_step == 20 for proposal in by_mesh.values())


def test_only_meshes_worth_a_change_are_proposed(searched):
    estimate, found = searched(PLANNED_RUNS[0])
    proposals = cheaper_meshes(estimate)

    assert len(proposals) <= 3
    limit = (1 - WORTHWHILE) * estimate.step_seconds
    faster = [each for each in found if each.estimate.step_seconds < limit]
    assert [each.changes for each in proposals] == [each.changes for each in faster[:3]]
    assert cheaper_meshes(found[0].estimate) == []


def test_overrides_are_json_values(searched):
    _, found = searched(PLANNED_RUNS[0])
    for override in found[0].overrides:
        key, _, value = override.partition("=")
        assert found[0].changes[key] == json.loads(value)


def test_the_search_splits_experts(tmp_path):
    estimate = estimate_of(PlannedRun("Qwen3-30B-A3B", 16, 64, is_lora=False), tmp_path)
    split = next(each for each in cheaper_meshes(estimate) if each.estimate.dims.ep > 1)
    assert any(text.endswith(f"ep_size={split.estimate.dims.ep}") for text in split.overrides)
    assert split.estimate.step_seconds < estimate.step_seconds / 3


def test_only_experts_are_split(tmp_path):
    estimate = estimate_of(PlannedRun("Llama-3-8B", 8, 64, is_lora=False), tmp_path)
    assert {dims.ep for dims in possible_meshes(estimate)} == {1}
