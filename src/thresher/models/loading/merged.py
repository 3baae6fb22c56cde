"""LoRA adapters that are merged into the weights of a model as they are read, whole or in slices.

A process reads the rows that it holds, and adds their part of each adapter in fp32. PEFT decides on the meta device
which matrix an adapter belongs to, and how it is scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from thresher.errors import UserError
from thresher.models.loading.adapters import AdapterFiles, attach_adapter
from thresher.models.loading.load import load_model
from thresher.models.loading.load_sharded import build_without_weights, load_dequantized
from thresher.models.loading.quantization import Quantization
from thresher.models.loading.weight_files import is_of_adapter, name_in_files


@dataclass(frozen=True)
class _Factors:
    """What an adapter makes of a matrix W: W + scaling B A, for DoRA with rows of other lengths."""

    a: Any
    b: Any
    scaling: float
    magnitudes: Any | None

    def apply(self, rows: slice, matrix: Tensor) -> Tensor:
        merged: Tensor = matrix + self.scaling * (self.b[rows, :].float() @ self.a[:, :].float())
        if self.magnitudes is None:
            return merged
        lengths: Tensor = self.magnitudes[rows].float() / torch.linalg.vector_norm(merged, dim=1)
        return merged * lengths[:, None]


@dataclass(frozen=True)
class _MergedSlices:
    """A stored matrix with its adapters; read like a slice of a safetensors file."""

    stored: Any
    adapters: Sequence[_Factors]

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape())

    def get_dtype(self) -> str:
        return str(self.stored.get_dtype())

    def __getitem__(self, slices: Any) -> Tensor:
        by_rows = isinstance(slices, tuple) and isinstance(slices[0], slice)
        rows, rest = (slices[0], (slice(None), *slices[1:])) if by_rows else (slice(None), slices)
        # all columns: DoRA needs whole rows
        matrix: Tensor = self.stored[rows, :].float()
        for adapter in self.adapters:
            matrix = adapter.apply(rows, matrix)
        return matrix[rest]


@dataclass(frozen=True)
class MergedAdapters:
    """The adapters of a model by the names of its weights."""

    factors: Mapping[str, Sequence[_Factors]]
    replaced: Mapping[str, Any]  # weights that were trained whole

    @classmethod
    def of(cls, path: str, adapters: Sequence[AdapterFiles], **settings: Any) -> MergedAdapters:
        """Open adapters for the model of a path. settings: of `build_without_weights`."""
        factors: dict[str, list[_Factors]] = defaultdict(list)
        replaced: dict[str, Any] = {}
        for files in adapters:
            model = build_without_weights(path, **settings)
            attach_adapter(model, files)
            names = [name for name, _ in model.named_parameters(remove_duplicate=False) if is_of_adapter(name)]
            tensors = files.tensors(names)
            for name, module in model.named_modules():
                if len(getattr(module, "lora_A", ())) or len(getattr(module, "lora_embedding_A", ())):
                    weight = f"{name_in_files(name)}.weight"
                    factors[weight].append(_factors(files, name, module, tensors))
            for name in names:
                if ".modules_to_save." in name:
                    weight = name.replace(".modules_to_save.default", "")
                    replaced[weight] = tensors[name]
                    factors.pop(weight, None)
        return cls(factors, replaced)

    @property
    def names(self) -> set[str]:
        return {*self.factors, *self.replaced}

    def slices(self, name: str, stored: Any) -> Any:
        """Return what to read in place of a stored tensor; stored: slices of a file."""
        stored = self.replaced.get(name, stored)
        return _MergedSlices(stored, self.factors[name]) if name in self.factors else stored

    @torch.no_grad()
    def merge_into(self, model: PreTrainedModel) -> PreTrainedModel:
        """Merge the adapters into a model that is loaded whole."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in self.names:
                parameter.copy_(self.slices(name, parameter)[:, :] if parameter.ndim > 1 else self.replaced[name][:])
        return model


def load_merged(path: str, adapters: Sequence[AdapterFiles], **settings: Any) -> PreTrainedModel:
    """Load a model whole, with adapters merged into it. settings: of `load_model`."""
    model = load_model(path, **settings)
    return MergedAdapters.of(path, adapters, **settings).merge_into(model) if adapters else model


def load_plain(
    path: str, adapters: Sequence[AdapterFiles], *, quantization: Quantization | None, **settings: Any
) -> PreTrainedModel:
    """Load a model with dense weights: with adapters merged into it, or those that a quantized one computes with."""
    if adapters:
        return load_merged(path, adapters, **settings)
    return load_dequantized(path, quantization=quantization, **settings)


def _factors(files: AdapterFiles, name: str, module: Any, tensors: Mapping[str, Any]) -> _Factors:
    if not isinstance(getattr(module, "base_layer", None), nn.Linear) or hasattr(module, "parameter_name"):
        raise UserError(
            f"the adapter {files.path} adapts {name_in_files(name)}, which is no linear module, so it cannot be merged "
            "when the model is loaded; merge it with PEFT's merge_and_unload and save that model"
        )
    a, b = (tensors[f"{name}.lora_{letter}.default.weight"] for letter in "AB")
    magnitudes = tensors.get(f"{name}.lora_magnitude_vector.default.weight")
    return _Factors(a, b, float(module.scaling["default"]), magnitudes)
