"""Processes that hold the same shards read each tensor once together, and have the values of the files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.parity import mesh_text, save_model
from tests.support.engines.shared_reads import error_of_a_load, load_and_count
from tests.support.small_runs import save_small_tokenizer
from thresher.builders.hardware import GPUS
from thresher.config import parse_config
from thresher.distributed.mesh import ParallelDims
from thresher.distributed.run_on_all import divide_by_size
from thresher.models.loading.load import load_model
from thresher.plan.estimate import Estimate
from thresher.plan.step import Cluster

pytestmark = pytest.mark.distributed


def bytes_of(path: Path) -> int:
    return sum(parameter.nbytes for parameter in load_model(str(path)).parameters())


@pytest.mark.covered
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "sizes",
    [
        ParallelDims(dp_replicate=2),
        ParallelDims(dp_replicate=4),
        ParallelDims(dp_replicate=2, dp_shard=2),
        ParallelDims(dp_replicate=2, tp=2),
        ParallelDims(dp_replicate=2, cp=2),
        ParallelDims(dp_replicate=2, pp=2),
    ],
    ids=mesh_text,
)
def test_replicas_read_each_tensor_once_and_have_the_values_of_the_files(sizes, family, pool_of, model_dirs):
    path, _ = model_dirs(family)
    model = load_model(str(path))
    expected = dict(model.named_parameters())

    loaded = pool_of(sizes.num_processes).run(load_and_count, sizes, str(path))

    held = [sum(values.nbytes for _, values in rank.values.values()) for rank in loaded]
    print(mesh_text(sizes), "read", [each.bytes_read for each in loaded], "hold", held, "of", bytes_of(path))
    assert sum(each.bytes_read for each in loaded) == sum(held) // sizes.dp_replicate
    largest = max(values.nbytes for _, values in loaded[0].values.values())
    assert max(each.bytes_read for each in loaded) <= max(held) / sizes.dp_replicate + largest
    for rank in loaded:
        assert all(torch.equal(values, expected[name][slices]) for name, (slices, values) in rank.values.items())


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        (ParallelDims(dp_replicate=4), {"dp_replicate": 4}),
        (ParallelDims(dp_replicate=2, dp_shard=2), {"dp_replicate": 2}),
        (ParallelDims(dp_shard=4), {}),
    ],
    ids=["replicas", "replicas of shards", "shards"],
)
def test_the_plan_gives_the_bytes_that_a_node_reads(sizes, axes, four_ranks, model_dirs, tmp_path):
    path = save_small_tokenizer(shutil.copytree(model_dirs("llama")[0], tmp_path / "model"))
    config = {
        "pretrain": str(path),
        "sequence_length": 64,
        "actor_train": {"strategy_args": {"strategy_config": axes}},
    }
    estimate = Estimate(parse_config(config), Cluster(GPUS["h100"], gpus_per_node=4, num_gpus=4))

    loaded = four_ranks.run(load_and_count, sizes, str(path))

    # the files are in fp32, and the formula is for bf16
    assert sum(each.bytes_read for each in loaded) == pytest.approx(2 * estimate.loaded_bytes_per_node, rel=0.01)


def test_a_model_that_transformers_must_convert_is_loaded_by_every_replica(two_ranks, model_dirs):
    path, _ = model_dirs("qwen3_moe")  # its experts are stored one by one
    expected = dict(load_model(str(path)).named_parameters())

    loaded = two_ranks.run(load_and_count, ParallelDims(dp_replicate=2), str(path))

    assert [each.bytes_read for each in loaded] == [bytes_of(path)] * 2
    assert all(torch.equal(values, expected[name]) for name, (_, values) in loaded[1].values.items())


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelDims(dp_shard=2),
        ParallelDims(pp=2),
        ParallelDims(dp_shard=2, pp=2),
        ParallelDims(dp_replicate=2, dp_shard=2),
    ],
    ids=mesh_text,
)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_that_are_stored_one_by_one_are_sharded(sizes, family, pool_of, tmp_path):
    path = save_model(tmp_path / "model", family, seed=0)
    expected = dict(load_model(str(path)).named_parameters())
    assert not any(name in load_file(path / "model.safetensors") for name in expected if ".experts." in name)

    loaded = pool_of(sizes.num_processes).run(load_and_count, sizes, str(path))

    assert {name for rank in loaded for name in rank.values} == expected.keys()
    for rank in loaded:
        assert sum(values.nbytes for _, values in rank.values.values()) < 0.75 * bytes_of(path)
        assert all(torch.equal(values, expected[name][slices]) for name, (slices, values) in rank.values.items())


def test_an_error_of_one_reader_is_raised_by_all(two_ranks, tmp_path):
    path = save_model(tmp_path / "model", "llama", seed=0, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1  # only the first rank compares the values
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    first, second = two_ranks.run(error_of_a_load, ParallelDims(dp_replicate=2), str(path))

    assert "different values" in first
    assert first == second


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "expected"),
    [
        ([1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ([1, 1, 1, 1], 4, [0, 1, 2, 3]),
        ([8, 1, 1, 1, 1], 2, [0, 1, 1, 1, 1]),
        ([5], 3, [1]),
        ([0, 0], 2, [0, 0]),
        ([], 2, []),
    ],
)
def test_items_are_divided_in_order_and_by_size(sizes, num_ranks, expected):
    assert divide_by_size(sizes, num_ranks) == expected
