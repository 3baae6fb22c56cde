"""An adapter that training starts from, or that is merged into the model, is read by slices on ranks that shard it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.support.engines.adapters import load_adapter_sharded, load_merged_shards, merged_by_peft, save_adapter
from tests.support.engines.parity import save_model
from thresher.distributed.mesh import ParallelDims

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("sizes", [ParallelDims(dp_shard=2), ParallelDims(tp=2)], ids=["dp_shard", "tp"])
def test_sharded_ranks_hold_the_values_of_the_file(two_ranks, model_dirs, tmp_path, sizes):
    model, _ = model_dirs("llama")
    adapter = save_adapter(tmp_path / "adapter", model)
    stored = load_file(adapter / "adapter_model.safetensors")
    for loaded in two_ranks.run(load_adapter_sharded, sizes, model, adapter):
        assert {f"base_model.model.{name.replace('.default', '')}" for name in loaded} == stored.keys()
        for name, tensor in loaded.items():
            assert torch.equal(tensor, stored[f"base_model.model.{name.replace('.default', '')}"])


@pytest.mark.parametrize(
    ("sizes", "family"),
    [
        (ParallelDims(dp_shard=2), "llama"),
        (ParallelDims(tp=2), "llama"),
        (ParallelDims(dp_replicate=2), "llama"),
        (ParallelDims(dp_shard=2), "qwen3_moe"),  # its experts are stored one by one
    ],
    ids=["dp_shard", "tp", "dp_replicate", "experts"],
)
def test_shards_are_those_of_the_merged_model(two_ranks, tmp_path, sizes, family):
    base = save_model(tmp_path / "base", family, seed=0, num_layers=2)
    settings = {"target_modules": ["q_proj", "v_proj", "o_proj"], "use_dora": True, "modules_to_save": ["norm"]}
    adapter = save_adapter(tmp_path / "adapter", base, **settings)
    expected = dict(merged_by_peft(base, adapter).named_parameters())
    before = dict(merged_by_peft(base).named_parameters())
    for loaded in two_ranks.run(load_merged_shards, sizes, base, adapter):
        assert loaded.keys() == expected.keys()
        for name, weight in loaded.items():
            torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=1e-5, msg=name)
            is_merged = name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight", "norm.weight"))
            assert torch.equal(weight, before[name]) != is_merged
