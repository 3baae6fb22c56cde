"""An adapter from which training starts is read by slices on ranks that shard the model."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.support.engines.adapters import load_adapter_sharded, save_adapter
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
