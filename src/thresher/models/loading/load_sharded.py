"""A model whose weights are split over processes, filled from safetensors: nobody ever holds it whole.

First the empty model (no memory), then the axes split its parameters, then each process reads its own slices.
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
from thresher.models.loading.load import LOAD_ERRORS, load_model_config, not_loadable, weight_files, without_dropout

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


def build_on_meta(
    path: str, *, dtype: torch.dtype, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model with the shapes of its weights and none of their numbers; buffers are real."""
    if not Path(path).is_dir():
        raise UserError(
            f"a model that is split over workers is read from a directory with safetensors, and {path} is none; "
            "download the model, or convert it with `thresher export`, and give that directory"
        )
    family = load_model_config(path, trust_remote_code=trust_remote_code)
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                family, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
            )
    except LOAD_ERRORS as error:
        raise not_loadable(path, error) from error
    model.tie_weights()
    return without_dropout(model)


def load_local_shards(model: PreTrainedModel, path: str, device: torch.device) -> None:
    """Give every parameter memory on a device, and the numbers of the file to those that the file has.

    Those of adapters get theirs from `init_adapters`.
    """
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    model.tie_weights()  # giving memory to a shared parameter made two of it
    reader = SafetensorsReader(Path(path))
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            reader.read(name.replace(".base_layer.", "."), parameter)


class SafetensorsReader:
    """The safetensors of a model directory, opened as they are needed."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str]
        index = directory / _INDEX
        if index.is_file():
            self._file_of = weight_files(index)
        elif (directory / _WHOLE).is_file():
            self._file_of = dict.fromkeys(self._open(_WHOLE).keys(), _WHOLE)
        else:
            raise UserError(f"{directory} has no {_WHOLE} and no {_INDEX}; save the model as safetensors")

    @torch.no_grad()
    def read(self, name: str, into: Tensor) -> None:
        """Copy this process's part of a tensor from its file."""
        if name not in self._file_of:
            raise UserError(
                f"the weight files of {self._directory} have no tensor {name}; load the model with transformers, save "
                "it again, and give that directory, or use one worker"
            )
        source = self._open(self._file_of[name]).get_slice(name)
        if tuple(source.get_shape()) != tuple(into.shape):
            raise UserError(
                f"{name} is {source.get_shape()} in {self._directory} and {list(into.shape)} in the model; the weight "
                "files and config.json do not belong together"
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
