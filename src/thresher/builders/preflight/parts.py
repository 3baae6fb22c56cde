"""The parts of a run that need no device: tokenizer, layout, configs, and the policy without its weights."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from thresher.builders.engines import trained_parts
from thresher.builders.inputs import find_layout
from thresher.builders.objective import build_objective
from thresher.builders.reference_mode import reference_mode, same_initial_weights
from thresher.config import DPOConfig
from thresher.errors import UserError
from thresher.losses.objective import Objective
from thresher.models.layouts import Layout, transformers_attention
from thresher.models.loading.load import DTYPES, load_model_config
from thresher.models.loading.load_sharded import build_without_weights
from thresher.reference.modes import ReferenceMode
from thresher.strategies.strategy import ParameterCounts


class RunParts:
    """Parts that several checks share, each built on first use; a part that cannot be built raises a UserError."""

    def __init__(self, config: DPOConfig):
        self.config = config

    @property
    def policy_path(self) -> str:
        return str(self.config.policy_path)  # `files` has rejected a config without a model

    @property
    def loads_reference(self) -> bool:
        """Whether the reference has a model besides the policy; an invalid loss may need one."""
        try:
            return self.mode in ("precompute", "concurrent")
        except UserError:
            return True

    @property
    def reference_path(self) -> str | None:
        """The model of the reference, if it is loaded and not the policy's."""
        return self.config.reference_path if self.loads_reference and not same_initial_weights(self.config) else None

    @cached_property
    def objective(self) -> Objective:
        return build_objective(self.config)

    @cached_property
    def mode(self) -> ReferenceMode:
        return reference_mode(self.config, self.objective)

    @cached_property
    def model_configs(self) -> dict[str, PreTrainedConfig]:
        """By path: of the policy, and of a separate reference."""
        trusts = self.config.actor_train.model_args.trust_remote_code
        configs = {self.policy_path: load_model_config(self.policy_path, trust_remote_code=trusts)}
        if (path := self.reference_path) is not None:
            configs[path] = load_model_config(path, trust_remote_code=self.config.trusts_reference_code)
        return configs

    @cached_property
    def _tokenizer_and_layout(self) -> tuple[PreTrainedTokenizerBase, Layout]:
        return find_layout(self.config)[:2]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer_and_layout[0]

    @property
    def layout(self) -> Layout:
        return self._tokenizer_and_layout[1]

    @cached_property
    def policy(self) -> nn.Module:
        """The policy on the meta device, with its adapters."""
        args = self.config.actor_train.model_args
        settings: dict[str, Any] = {
            "attn_implementation": transformers_attention(args.attn_implementation),
            "trust_remote_code": args.trust_remote_code,
        }
        model = build_without_weights(self.policy_path, dtype=DTYPES[args.master_dtype], **settings)
        # as strategies/native stores it
        return trained_parts(args).apply(model, frozen_dtype=DTYPES[args.dtype])

    @property
    def parameters(self) -> ParameterCounts:
        return ParameterCounts.of(self.policy)
