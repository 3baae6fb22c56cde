"""What a strategy gets from the builders: the model to build, and the run to check before any worker starts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from thresher.distributed.groups import Group
from thresher.models.layouts import Layout, transformers_attention
from thresher.models.loading.adapters import AdapterFiles
from thresher.models.loading.load import DTYPES, load_model, load_model_config
from thresher.models.loading.load_sharded import build_on_meta, build_to_share
from thresher.models.loading.location import named_model
from thresher.models.loading.trained import TrainedParts
from thresher.models.optimizations.compile import Compilation
from thresher.models.optimizations.recompute import Recompute
from thresher.strategies.optimizer import OptimizerSettings


@dataclass(frozen=True)
class ModelSource:
    """Path of a model and how to load it; dtype: precision of the loaded weights."""

    path: str | None
    dtype: str
    attn_implementation: str | None
    trust_remote_code: bool

    def load(self) -> PreTrainedModel:
        return load_model(self.named_path, **self._settings)

    def empty(self) -> PreTrainedModel:
        """The model on the meta device."""
        return build_on_meta(self.named_path, **self._settings)

    def empty_to_share(self) -> PreTrainedModel | None:
        """The model on the meta device if replicas can read its files together; None if each has to load it."""
        return build_to_share(self.named_path, **self._settings)

    def move(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Move a loaded model to a device."""
        return module.to(device)

    @property
    def shards_path(self) -> str | None:
        """The files that have the shards of a parallelized model; None: the shards get no values."""
        return self.named_path

    def config(self) -> PreTrainedConfig:
        return load_model_config(self.named_path, trust_remote_code=self.trust_remote_code)

    @property
    def named_path(self) -> str:
        return named_model(self.path)

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "dtype": DTYPES[self.dtype],
            "attn_implementation": transformers_attention(self.attn_implementation),
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass(frozen=True)
class ModelSpec:
    """A frozen model to build on every process of its role.

    world: these processes. settings: the validated `strategy_config`, of the class that the strategy declares.
    adapter: LoRA modules that the model has. compilation: what torch.compile compiles of it.
    """

    source: ModelSource
    compute_dtype: torch.dtype
    layout: Layout
    device: torch.device
    world: Group
    settings: Any
    adapter: AdapterFiles | None = None
    compilation: Compilation | None = None


@dataclass(frozen=True, kw_only=True)
class PolicySpec(ModelSpec):
    """A policy to build.

    offloads_activations: the inputs of recomputed layers are in host memory until the backward. router_loss_coef:
    weight of the load-balancing loss of a mixture-of-experts model.
    """

    optimizer: OptimizerSettings
    trained: TrainedParts = field(default_factory=TrainedParts)
    gradient_checkpointing: Recompute = "off"
    offloads_activations: bool = False
    seed: int = 0
    router_loss_coef: float = 0.0


@dataclass(frozen=True)
class StrategyCheck:
    """A model on a strategy, to be checked without weights and workers.

    section: `actor_train` or `reference`, for messages. trained: None for a reference. is_synced: the reference is
    updated towards the policy during training, so both must be on this strategy. training: training_args of the policy
    by name, and `pairs_per_step`, for strategies whose settings repeat some of them. load_config, find_layout: called
    on first use, so that a path that cannot be used at all is reported as such.
    """

    section: str
    settings: Any
    num_workers: int
    path: str
    load_config: Callable[[], PreTrainedConfig]
    find_layout: Callable[[PreTrainedConfig], Layout]
    dtype: str
    master_dtype: str
    trained: TrainedParts | None = None
    router_loss_coef: float = 0.0
    compiles: bool = False
    is_synced: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        return self.load_config()

    @cached_property
    def layout(self) -> Layout:
        return self.find_layout(self.model_config)


def seed_dropout(seed: int, *ranks: int) -> None:
    """Seed dropout differently on each of the ranks that draw masks of their own, such as data-parallel ones."""
    while ranks and not ranks[-1]:
        ranks = ranks[:-1]
    seed = int(np.random.SeedSequence([seed, *ranks]).generate_state(1)[0]) if ranks else seed
    # as transformers' set_seed, whose module imports PEFT; torch seeds every device
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
