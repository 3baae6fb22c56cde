"""Load a sharded model from safetensors: no process ever holds the full model.

The model is built on the meta device, its parameters are sharded, and each process then reads its shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from thresher.distributed.sharded_tensor import local_slices, to_local
from thresher.errors import UserError
from thresher.models.loading.load import load_model_config, translate_load_errors, without_dropout
from thresher.models.loading.weight_files import find_files_to_shard, open_safetensors


def build_on_meta(
    path: str, *, dtype: torch.dtype, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model on the meta device to read its shards; reject one that cannot be sharded."""
    find_files_to_shard(path)
    return build_without_weights(
        path, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
    )


def build_without_weights(
    path: str, *, dtype: torch.dtype, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model whose parameters are on the meta device; buffers are real."""
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    with translate_load_errors("model", path), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    return without_dropout(model)


def load_local_shards(model: PreTrainedModel, path: str, device: torch.device) -> None:
    """Allocate every parameter on a device and read its local shard; `init_adapters` sets those of adapters."""
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    model.tie_weights()  # allocating a tied parameter made two of it
    reader = SafetensorsReader(Path(path))
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            reader.read(name.replace(".base_layer.", "."), parameter)


class SafetensorsReader:
    """Reads tensor shards from the safetensors files of a model directory."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._file_of: dict[str, Any] = {}
        for file in map(open_safetensors, find_files_to_shard(str(directory))):
            self._file_of |= dict.fromkeys(file.keys(), file)

    @torch.no_grad()
    def read(self, name: str, into: Tensor) -> None:
        """Copy this process's shard of a tensor from its file."""
        if name not in self._file_of:
            raise UserError(
                f"the weight files of {self._directory} have no tensor {name}; load the model with transformers and "
                "save it to a new directory, or use one worker"
            )
        source = self._file_of[name].get_slice(name)
        if tuple(source.get_shape()) != tuple(into.shape):
            raise UserError(
                f"{name} has shape {source.get_shape()} in {self._directory} and {list(into.shape)} in the model; use "
                "the config.json that belongs to the weight files"
            )
        local = to_local(into)
        if local.numel():
            local.copy_(source[local_slices(into)])
