"""An adapter on disk, and one loaded by ranks that shard the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.engines.parity import CPU, gather_full, mesh_of
from thresher.distributed.mesh import ParallelDims
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.parallelize import parallelize
from thresher.models.loading.adapters import AdapterFiles, attach_adapter
from thresher.models.loading.load_sharded import build_on_meta


def save_adapter(directory: Path, model: Path, **settings: Any) -> Path:
    """Save an adapter that changes the model."""
    torch.manual_seed(5)
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.5)
    adapted.save_pretrained(directory)
    return directory


def load_adapter_sharded(sizes: ParallelDims, model_dir: Path, adapter_dir: Path) -> dict[str, Tensor]:
    """The full tensors of the adapter, gathered from the shards of all ranks."""
    model = build_on_meta(str(model_dir), dtype=torch.float32)
    adapter = AdapterFiles.find(str(adapter_dir))
    attach_adapter(model, adapter)
    parallelize(model, str(model_dir), mesh_of(sizes), FSDP2Settings(), torch.float32, CPU)
    adapter.load(model)
    return {name: gather_full(each) for name, each in model.named_parameters() if ".lora_" in name}
