"""What an engine gets from the builders: the model of a role, to check before any worker starts and then to build.

An engine receives its own settings (`strategy_config`) and the config's sections for the policy whole, and reads what
it supports from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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
from thresher.errors import UserError
from thresher.models.layouts import Layout, transformers_attention
from thresher.models.loading.adapters import AdapterFiles
from thresher.models.loading.load import DTYPES, load_model_config
from thresher.models.loading.load_sharded import build_on_meta, build_to_share, build_without_weights, cannot_quantize
from thresher.models.loading.merged import MergedAdapters, load_merged
from thresher.models.loading.quantization import Quantization, stored_quantization
from thresher.models.loading.trained import TrainedParts
from thresher.models.optimizations.compile import Compilation

# the class of `strategy_config` that the engine declares
Settings = TypeVar("Settings", bound=StrategySettings)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Generic[Settings]):
    """The model of a role, to check without weights and workers, and to build on every process of the role."""

    # `actor_train` or `reference`, also for messages
    section: str = "actor_train"
    path: str
    # precision to compute in, and of the loaded weights
    dtype: str = "fp32"
    master_dtype: str = "fp32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    settings: Settings
    # all processes of the role; a check knows their number only
    world: Group
    device: torch.device
    # called on first use, so a path that cannot be used at all is reported as such
    find_layout: Callable[[], Layout]
    compilation: Compilation | None = None
    # the policy's, even for a reference
    training: TrainingArgs = field(default_factory=TrainingArgs)
    model_args: ModelArgs = field(default_factory=ModelArgs)
    pairs_per_step: int = 1
    seed: int = 0
    # the reference is updated towards the policy during training, so both must be on this engine
    is_synced: bool = False
    # the policy has a head for rewards, in place of the LM head
    is_reward_model: bool = False
    # the loss couples the pairs of a step: they are scored once more before the backward, with the same dropout
    scores_steps_twice: bool = False
    # of the policy alone
    trained: TrainedParts = field(default_factory=TrainedParts)
    # of the frozen matrices of both models
    quantization: Quantization | None = None
    # LoRA modules that a frozen model has
    adapter: AdapterFiles | None = None
    merged_adapters: Sequence[AdapterFiles] = ()

    @property
    def is_policy(self) -> bool:
        return self.section == "actor_train"

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @cached_property
    def layout(self) -> Layout:
        return self.find_layout()

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        return load_model_config(self.path, trust_remote_code=self.trust_remote_code)

    @property
    def compiles(self) -> bool:
        return self.training.torch_compile is True

    @property
    def balances_experts(self) -> bool:
        """Whether the load-balancing loss of a mixture-of-experts model is added to the step's loss."""
        return self.is_policy and bool(self.model_args.moe_aux_loss_coef)

    def require_adamw(self, engine: str) -> None:
        """Reject another optimizer of a policy, and parameter groups, for an engine that has none."""
        if not self.is_policy:
            return
        if self.training.optim != "adamw":
            raise UserError(
                f"{self.section}.training_args.optim {self.training.optim} is not supported by {engine}; use "
                "fsdp2_train, or optim=adamw"
            )
        for name, value in (
            ("training_args.param_groups", self.training.param_groups),
            ("model_args.lora_plus_ratio", self.model_args.lora_plus_ratio),
        ):
            if value:
                raise UserError(
                    f"{self.section}.{name} is not supported by {engine}, which has one learning rate; use "
                    "fsdp2_train, or remove it"
                )

    def require_plain_adapters(self, where: str, hint: str, *, allows_dora: bool = False) -> None:
        """Reject DoRA and modules that are trained whole, in a new adapter or one on disk."""
        for each in (self.trained.lora, self.trained.adapter, self.adapter):
            if each is not None and each.use_dora and not allows_dora:
                raise UserError(
                    f"actor_train.model_args.use_dora needs whole rows of the weights, which {where} splits; {hint}, "
                    "or train without DoRA"
                )
            if each is not None and each.modules_to_save:
                raise UserError(
                    f"actor_train.model_args.modules_to_save {list(each.modules_to_save)} is not supported with "
                    f"{where}; {hint}, or remove modules_to_save"
                )

    @cached_property
    def merged(self) -> MergedAdapters | None:
        """The adapters that are merged into the model when it is loaded."""
        if not self.merged_adapters:
            return None
        return MergedAdapters.of(self.path, self.merged_adapters, **self._load_settings)

    @property
    def is_quantized(self) -> bool:
        return (self.quantization or stored_quantization(self.path)) is not None

    def load(self) -> PreTrainedModel:
        if self.is_quantized:
            raise cannot_quantize(self.path)
        return load_merged(self.path, self.merged_adapters, **self._load_settings)

    def empty(self) -> PreTrainedModel:
        """The model on the meta device."""
        return build_on_meta(self.path, **self._load_settings, quantization=self.quantization)

    def without_weights(self) -> PreTrainedModel:
        """The same for files of any kind, which are not looked at."""
        return build_without_weights(self.path, **self._load_settings, quantization=self.quantization)

    def empty_to_share(self) -> PreTrainedModel | None:
        """The model on the meta device if replicas can read its files together; None if each has to load it."""
        return build_to_share(self.path, **self._load_settings, quantization=self.quantization)

    def move(self, module: nn.Module) -> nn.Module:
        """Move a loaded model to the device."""
        return module.to(self.device)

    @property
    def shards_path(self) -> str | None:
        """The files that have the shards of a parallelized model; None: the shards get no values."""
        return self.path

    @property
    def _load_settings(self) -> dict[str, Any]:
        return {
            "dtype": DTYPES[self.master_dtype],
            "attn_implementation": transformers_attention(self.attn_implementation),
            "trust_remote_code": self.trust_remote_code,
            "is_reward_model": self.is_reward_model,
        }


def seed_dropout(seed: int, *ranks: int) -> None:
    """Seed dropout differently on each of the ranks that draw their own masks, such as data-parallel ranks."""
    while ranks and not ranks[-1]:
        ranks = ranks[:-1]
    seed = int(np.random.SeedSequence([seed, *ranks]).generate_state(1)[0]) if ranks else seed
    # as transformers' set_seed, whose module imports PEFT; torch seeds every device
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
