"""Read a PEFT LoRA adapter that was trained before: its settings and its tensors, whole or by slices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thresher.errors import UserError
from thresher.models.loading.load_sharded import copy_shard
from thresher.models.loading.weight_files import find_file, missing_tensor, open_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# settings of LoRA that change what an adapter computes, and are applied
APPLIED = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "fan_in_fan_out"),
)
# settings that change what an adapter computes, and are not applied
_NOT_APPLIED = (
    *("modules_to_save", "use_dora", "target_parameters", "trainable_token_indices", "layer_replication", "lora_bias"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
    "velora_config",
)


@dataclass(frozen=True)
class AdapterFiles:
    """A LoRA adapter on disk; settings: those of `APPLIED` that its config has."""

    path: str
    settings: Mapping[str, Any]
    weights: Path

    @classmethod
    def find(cls, path: str) -> AdapterFiles:
        """Find an adapter in a directory or on the Hub; reject one that is not plain LoRA in safetensors."""
        config, weights = find_file(path, CONFIG), find_file(path, WEIGHTS)
        if config is None or weights is None:
            raise UserError(
                f"{path} is not a LoRA adapter: it has no {CONFIG if config is None else WEIGHTS}; give a directory "
                "that PEFT's save_pretrained wrote"
            )
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
            kind, starts = values["peft_type"], values.get("init_lora_weights", True)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{config} cannot be read ({error!r}); copy or download the adapter again") from error
        unsupported = [name for name in _NOT_APPLIED if values.get(name)]
        if kind != "LORA" or unsupported or values.get("bias", "none") != "none":
            what = ", ".join(unsupported) or (f"bias {values['bias']}" if kind == "LORA" else f"type {kind}")
            raise UserError(
                f"the adapter {path} has {what}, which is not supported; merge it into the model with PEFT's "
                "merge_and_unload and train a new adapter"
            )
        if not isinstance(starts, bool) and starts != "gaussian":
            raise UserError(
                f"the adapter {path} was initialized with {starts}, which changed the base weights; merge it with "
                "PEFT, or convert it with path_initial_model_for_weight_conversion of save_pretrained"
            )
        return cls(path, {name: values[name] for name in APPLIED if values.get(name) is not None}, weights)

    def check_settings(self, *, rank: int | None, alpha: float | None, target: Sequence[str] | None) -> None:
        """Reject settings of a run that contradict the adapter; None: not set."""
        targets = self.settings.get("target_modules")
        own = {
            "lora_rank": (rank, self.settings.get("r")),
            "lora_alpha": (alpha, self.settings.get("lora_alpha")),
            "lora_target": (None if target is None else sorted(target), _as_sorted(targets)),
        }
        for name, (given, stored) in own.items():
            if given is not None and given != stored:
                raise UserError(
                    f"{name} is {given}, but the adapter {self.path} has {stored}; remove {name}, which is read from "
                    "the adapter"
                )

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        """Copy this process's shard of every tensor; the adapter must have exactly the tensors of the model."""
        parameters = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
        for name, stored in self.tensors(parameters).items():
            copy_shard(stored, parameters[name], self.path, _stored_name(name))

    def tensors(self, names: Iterable[str]) -> dict[str, Any]:
        """Open the tensors of a model's adapter, to be read in slices; the file must have exactly these."""
        file = open_safetensors(self.weights)
        unread = set(file.keys())
        found = {}
        for name in names:
            stored = _stored_name(name)
            if stored not in unread:
                raise missing_tensor(self.path, stored)
            unread.remove(stored)
            found[name] = file.get_slice(stored)
        if unread:
            raise UserError(
                f"the adapter {self.path} has a tensor {min(unread)}, which the model has not; use the model that the "
                "adapter was trained on"
            )
        return found


def _stored_name(name: str) -> str:
    return f"base_model.model.{name.replace('.default', '')}"


def _as_sorted(targets: Any) -> Any:
    return sorted(targets) if isinstance(targets, list) else targets
