"""An adapter on disk, and one loaded by ranks that shard the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.engines.config_runs import world_of_pool
from tests.support.engines.parity import CPU, gather_full, mesh_of
from thresher.distributed.mesh import ParallelDims
from thresher.engines.native.declaration import FSDP2Settings
from thresher.engines.native.parallelize import parallelize
from thresher.models.loading.adapters import AdapterFiles, attach_adapter
from thresher.models.loading.load_sharded import build_on_meta, load_local_shards
from thresher.models.loading.merged import MergedAdapters


def save_adapter(directory: Path, model: Path, std: float = 0.5, **settings: Any) -> Path:
    """Save an adapter that changes the model."""
    torch.manual_seed(5)
    settings = {"target_modules": ["q_proj", "v_proj"]} | settings
    config = LoraConfig(r=2, lora_alpha=6, task_type="CAUSAL_LM", **settings)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_A" in name or ".lora_B" in name:
                parameter.normal_(0.0, std)
            elif parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * std / 2)
    adapted.save_pretrained(directory, save_embedding_layers=False)
    return directory


def merged_by_peft(model: Path, *adapters: Path) -> Any:
    """A model with adapters merged into it in their order."""
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for adapter in adapters:
        merged = PeftModel.from_pretrained(merged, adapter).merge_and_unload()
    return merged.eval()


def load_adapter_sharded(sizes: ParallelDims, model_dir: Path, adapter_dir: Path) -> dict[str, Tensor]:
    """The full tensors of the adapter, gathered from the shards of all ranks."""
    model = build_on_meta(str(model_dir), dtype=torch.float32)
    adapter = AdapterFiles.find(str(adapter_dir))
    attach_adapter(model, adapter)
    parallelize(model, str(model_dir), mesh_of(sizes), FSDP2Settings(), torch.float32, CPU)
    adapter.load(model)
    return {name: gather_full(each) for name, each in model.named_parameters() if ".lora_" in name}


def load_merged_shards(sizes: ParallelDims, model_dir: Path, adapter_dir: Path) -> dict[str, Tensor]:
    """The full weights of a model that an adapter is merged into, gathered from the shards of all ranks."""
    merged = MergedAdapters.of(str(model_dir), [AdapterFiles.find(str(adapter_dir))], dtype=torch.float32)
    if sizes.dp_replicate > 1:
        model = build_on_meta(str(model_dir), dtype=torch.float32)
        load_local_shards(model, str(model_dir), CPU, replicas=world_of_pool(), merged=merged)
    else:
        model = build_on_meta(str(model_dir), dtype=torch.float32)
        parallelize(model, str(model_dir), mesh_of(sizes), FSDP2Settings(), torch.float32, CPU, merged)
    return {name: gather_full(each) for name, each in model.named_parameters()}
