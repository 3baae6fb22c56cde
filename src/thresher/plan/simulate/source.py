"""A model whose weights and adapters are allocated and never read."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from thresher.engines.spec import ModelSource
from thresher.models.loading.load_sharded import allocate, build_without_weights
from thresher.models.loading.trained import TrainedParts
from thresher.models.logps import base_model


@dataclass(frozen=True)
class SourceWithoutValues(ModelSource):
    """The model of a path by its config alone."""

    @classmethod
    def of(cls, source: ModelSource) -> SourceWithoutValues:
        return cls(**{field.name: getattr(source, field.name) for field in fields(source)})

    def load(self) -> PreTrainedModel:
        return self.empty()

    def empty_to_share(self) -> None:
        return None

    def move(self, module: nn.Module, device: torch.device) -> nn.Module:
        allocate(base_model(module), device)  # `Module.to` copies values, and there are none
        return module

    def empty(self) -> PreTrainedModel:
        # plain tensors on the meta device: a module cannot replace parameters that are fake already
        with _disable_current_modes():
            return build_without_weights(self.named_path, **self._settings)

    @property
    def shards_path(self) -> None:
        return None


@dataclass(frozen=True)
class TrainedPartsWithoutValues(TrainedParts):
    """The trained part of such a model."""

    @classmethod
    def of(cls, trained: TrainedParts) -> TrainedPartsWithoutValues:
        return cls(**{field.name: getattr(trained, field.name) for field in fields(trained)})

    def apply(self, model: PreTrainedModel, frozen_dtype: torch.dtype | None = None) -> nn.Module:
        with _disable_current_modes():
            return super().apply(model, frozen_dtype)
