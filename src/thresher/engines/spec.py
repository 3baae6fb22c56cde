"""What an engine gets from the builders: the model to build, and the run to check before any worker starts.

An engine receives its own settings (`strategy_config`) and the config's sections for the policy whole, and reads what
it supports from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from thresher.config.roles import ModelArgs, TrainingArgs
from thresher.config.strategies import StrategySettings
from thresher.distributed.groups import Group
from thresher.models.layouts import Layout, transformers_attention
from thresher.models.loading.adapters import AdapterFiles
from thresher.models.loading.load import DTYPES, load_model, load_model_config
from thresher.models.loading.load_sharded import build_on_meta, build_to_share
from thresher.models.loading.location import named_model
from thresher.models.loading.trained import TrainedParts
from thresher.models.optimizations.compile import Compilation

# the class of `strategy_config` that the engine declares
Settings = TypeVar("Settings", bound=StrategySettings)


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
class ModelSpec(Generic[Settings]):
    """A frozen model to build on every process of its role."""

    source: ModelSource
    compute_dtype: torch.dtype
    layout: Layout
    device: torch.device
    # all processes of the role
    world: Group
    settings: Settings
    # LoRA modules that the model has
    adapter: AdapterFiles | None = None
    compilation: Compilation | None = None


@dataclass(frozen=True, kw_only=True)
class PolicySpec(ModelSpec[Settings]):
    """A policy to build."""

    training: TrainingArgs
    model_args: ModelArgs = field(default_factory=ModelArgs)
    trained: TrainedParts = field(default_factory=TrainedParts)
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineCheck(Generic[Settings]):
    """A model on an engine, to be checked without weights and workers."""

    # `actor_train` or `reference`, for messages
    section: str
    settings: Settings
    num_workers: int
    path: str
    # both called on first use, so a path that cannot be used at all is reported as such
    load_config: Callable[[], PreTrainedConfig]
    find_layout: Callable[[PreTrainedConfig], Layout]
    dtype: str
    master_dtype: str
    # the policy's, even for a reference
    training: TrainingArgs = field(default_factory=TrainingArgs)
    model_args: ModelArgs = field(default_factory=ModelArgs)
    pairs_per_step: int = 1
    # None for a reference
    trained: TrainedParts | None = None
    # the reference is updated towards the policy during training, so both must be on this engine
    is_synced: bool = False

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        return self.load_config()

    @cached_property
    def layout(self) -> Layout:
        return self.find_layout(self.model_config)

    @property
    def compiles(self) -> bool:
        return self.training.torch_compile is True

    @property
    def balances_experts(self) -> bool:
        """Whether the load-balancing loss of a mixture-of-experts model is added to the step's loss."""
        return self.trained is not None and bool(self.model_args.moe_aux_loss_coef)


def seed_dropout(seed: int, *ranks: int) -> None:
    """Seed dropout differently on each of the ranks that draw their own masks, such as data-parallel ranks."""
    while ranks and not ranks[-1]:
        ranks = ranks[:-1]
    seed = int(np.random.SeedSequence([seed, *ranks]).generate_state(1)[0]) if ranks else seed
    # as transformers' set_seed, whose module imports PEFT; torch seeds every device
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
