"""Load models and tokenizers: Hugging Face directories (safetensors) and GGUF files.

Decides: no code from model repositories unless trusted, no pickled weights, every dropout off.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from thresher.errors import UserError
from thresher.file_names import is_safe_relative_path

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError)  # what transformers raises of a model that cannot be had


def not_loadable(path: str, error: Exception) -> UserError:
    return UserError(f"no model can be loaded from {path}: {_reason(error)}")


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies with a model."""
    directory, gguf = _location(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, **gguf
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"no tokenizer can be loaded from {path}: {_reason(error)}") from error
    return tokenizer


def load_model_config(path: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load a model's own config: what it is built of, without its weights."""
    directory, gguf = _location(path)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, **gguf)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"no model config can be loaded from {path}: {_reason(error)}") from error
    _refuse_kernels(config, path)
    return config


def max_positions(family: PreTrainedConfig) -> int | None:
    """Longest sequence that a model was built for; None where it has no limit."""
    limit = getattr(family.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def load_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal language model with every dropout off."""
    directory, gguf = _location(path)
    if not gguf:
        load_model_config(
            path, trust_remote_code=trust_remote_code
        )  # refuses what the model's own config may not ask for
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=None if gguf else True,
            **gguf,
        )
    except LOAD_ERRORS as error:
        raise not_loadable(path, error) from error
    if gguf:
        model = _without_quantization(model, dtype)
    return without_dropout(model)


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Turn every dropout off, and the cache that only generation needs."""
    disable_dropout(model)
    _turn_config_dropout_off(model.config)
    model.config.use_cache = False
    return model


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to zero: policy and reference must agree at step 0, and a step must be repeatable."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # many layers of transformers keep a rate as a plain float: dropout, attention_dropout, layerdrop, jitter_noise
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _turn_config_dropout_off(config: PreTrainedConfig) -> None:
    # some families read a rate from their config at every forward
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)


def set_pad_token(tokenizer: PreTrainedTokenizerBase, pad_token: str | None, path: str) -> int:
    """Return the padding id; a tokenizer without one needs `model_args.pad_token`."""
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise UserError(f"pad_token {pad_token!r} is not in the vocabulary of {path}; name an existing token")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        known = [token for token in (tokenizer.unk_token, tokenizer.eos_token) if token]
        example = known[0] if known else "<a token of its vocabulary>"
        raise UserError(
            f"the tokenizer of {path} has no pad token; name one that exists, such as "
            f"`actor_train.model_args.pad_token={example}`"
        )
    return int(tokenizer.pad_token_id)


def _location(path: str) -> tuple[str, dict[str, Any]]:
    """Split a GGUF file into what transformers wants: its directory and its name."""
    location = Path(path)
    if location.suffix == ".gguf":
        if not location.is_file():
            raise UserError(
                f"model file {path} does not exist; give the path of a `.gguf` file or of a model directory"
            )
        return str(location.parent), {"gguf_file": location.name}
    if location.is_dir():
        if not (location / "config.json").is_file():
            raise UserError(
                f"model directory {path} has no config.json; give a Hugging Face model directory, or the path of a "
                "`.gguf` file"
            )
        _check_weight_index(location)
        return str(location), {}
    if not _HUB_ID.fullmatch(path):
        raise UserError(
            f"model directory {path} does not exist; give the path of a model directory or of a `.gguf` file"
        )
    return path, {}


def _refuse_kernels(config: PreTrainedConfig, path: str) -> None:
    """A model's config may name native code on the hub, which transformers would fetch and run."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        kernel = getattr(part, "_attn_implementation", None)
        if kernel is not None and "/" in str(kernel):
            raise UserError(
                f"the config.json of {path} asks for the attention kernel {kernel}, which would be fetched and run; "
                "remove it there, or name the kernel as model_args.attn_implementation if you trust it"
            )


def _check_weight_index(directory: Path) -> None:
    for index in directory.glob("*.index.json"):
        weight_files(index)


def weight_files(index: Path) -> dict[str, str]:
    """Read which file has which tensor; an index that leads out of its directory is refused."""
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = set(file_of.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is no index of weights ({error}); copy or download the model again") from error
    if outside := [name for name in names if not is_safe_relative_path(name)]:
        raise UserError(f"{index} names {outside[0]!r}, which is no file of the model; do not use this model")
    return dict(file_of)


def _without_quantization(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Rebuild a dequantised model: one that was loaded from GGUF refuses to be saved."""
    values = model.config.to_dict()
    values.pop("quantization_config", None)
    config = AutoConfig.for_model(**values)
    config._attn_implementation = model.config._attn_implementation
    plain: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            "it brings Python code of its own, which is not run; read that code, and if you trust it, set "
            "model_args.trust_remote_code: true under actor_train (under reference, for a model of its own)"
        )
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
