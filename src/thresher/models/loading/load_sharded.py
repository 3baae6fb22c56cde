"""Load a sharded model from safetensors: no process ever holds the full model.

The model is built on the meta device, its parameters are sharded, and each process then reads its shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from thresher.distributed.sharded_tensor import local_slices, to_local
from thresher.errors import UserError
from thresher.models.loading.load import load_model_config, translate_load_errors, weight_files, without_dropout

_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"


def build_on_meta(
    path: str, *, dtype: torch.dtype, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model whose parameters are on the meta device; buffers are real."""
    if not Path(path).is_dir():
        raise UserError(
            f"a sharded model is read from a directory with safetensors, and {path} is not a directory; download the "
            "model, or convert it with `thresher export`, and use that directory"
        )
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
    """Reads tensor shards from the safetensors files of a model directory; files are opened on first use."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str]
        index = directory / _INDEX
        if index.is_file():
            self._file_of = weight_files(index)
        elif (directory / _SINGLE_FILE).is_file():
            self._file_of = dict.fromkeys(self._open(_SINGLE_FILE).keys(), _SINGLE_FILE)
        else:
            raise UserError(f"{directory} has neither {_SINGLE_FILE} nor {_INDEX}; save the model as safetensors")

    @torch.no_grad()
    def read(self, name: str, into: Tensor) -> None:
        """Copy this process's shard of a tensor from its file."""
        if name not in self._file_of:
            raise UserError(
                f"the weight files of {self._directory} have no tensor {name}; load the model with transformers and "
                "save it to a new directory, or use one worker"
            )
        source = self._open(self._file_of[name]).get_slice(name)
        if tuple(source.get_shape()) != tuple(into.shape):
            raise UserError(
                f"{name} has shape {source.get_shape()} in {self._directory} and {list(into.shape)} in the model; use "
                "the config.json that belongs to the weight files"
            )
        local = to_local(into)
        if local.numel():
            local.copy_(source[local_slices(into)])

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self._directory / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{self._directory / file} is not a readable safetensors file ({error}); copy the model again"
                ) from error
        return self._files[file]
