"""What of a model is trained: all weights, all but frozen modules, or LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from thresher.models.loading.adapter_files import AdapterFiles
from thresher.models.loading.freeze import freeze_modules
from thresher.models.loading.lora import attach_adapter, attach_lora, init_adapters
from thresher.models.loading.narrow import narrow_frozen_matrices
from thresher.models.pipeline_chunk import decoder_of


@dataclass(frozen=True)
class LoraSettings:
    """A new adapter; alpha None: twice the rank. init: see `attach_lora`."""

    rank: int
    alpha: float | None
    target: Sequence[str]
    init: str = "default"

    @property
    def starts_from_weights(self) -> bool:
        """Whether the adapter starts with a part of the weights (PiSSA), which the base model then lacks."""
        return self.init != "default"


@dataclass(frozen=True)
class TrainedParts:
    """The trained part of a model. lora: a new adapter; adapter: one on disk; neither: the weights themselves."""

    lora: LoraSettings | None = None
    adapter: AdapterFiles | None = None
    lora_dropout: float = 0.0
    frozen_prefixes: Sequence[str] = ()

    @property
    def has_adapter(self) -> bool:
        return self.lora is not None or self.adapter is not None

    def apply(self, model: PreTrainedModel, frozen_dtype: torch.dtype | None = None) -> nn.Module:
        """Add adapters and freeze the rest, or freeze the named modules; the model may be on the meta device.

        frozen_dtype: precision of the matrices of layers under adapters (see narrow.py); None: that of the model.
        """
        if self.frozen_prefixes:
            freeze_modules(model, self.frozen_prefixes)
        if not self.has_adapter:
            return model
        module = self._attach(model)
        if frozen_dtype is not None:
            narrow_frozen_matrices(decoder_of(model), frozen_dtype)
        return module

    def _attach(self, model: PreTrainedModel) -> nn.Module:
        if self.adapter is not None:
            return attach_adapter(model, self.adapter, dropout=self.lora_dropout)
        lora = self.lora
        assert lora is not None  # noqa: S101
        return attach_lora(
            model, rank=lora.rank, alpha=lora.alpha, dropout=self.lora_dropout, target=lora.target, init=lora.init
        )

    def init(self, model: PreTrainedModel, seed: int) -> None:
        """Set the initial values of the adapters of a model that has its weights."""
        if self.adapter is not None:
            self.adapter.load(model)
        elif self.lora is not None and not self.lora.starts_from_weights:
            init_adapters(model, seed)
