"""Load models and tokenizers from Hugging Face directories (safetensors) and GGUF files.

Code in model repositories runs only if trusted, pickled weights are rejected, and all dropout is disabled.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from thresher.errors import UserError
from thresher.models.loading.location import locate_model, locate_tokenizer
from thresher.models.loading.weight_files import (
    differently_tied,
    find_file,
    find_weight_files,
    missing_tensor,
    wrong_shape,
)

# the head of a reward model; a causal language model lacks it, and training then starts from zeros
REWARD_HEAD = "score.weight"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# far beyond every model
_LARGEST_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 1000),
    **dict.fromkeys(("hidden_size", "n_embd", "num_attention_heads", "n_head"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "vocab_size"), 1 << 24),
}
# configs and tokenizers by class, file, its state and whether its code is trusted
_read_from_gguf: dict[tuple[Any, Path, int, int, bool], Any] = {}


@contextmanager
def translate_load_errors(what: str, path: str) -> Iterator[None]:
    """Turn the errors that transformers raises for an unusable model into a UserError."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RecursionError, StrictDataclassError) as error:
        raise UserError(f"cannot load the {what} from {path}: {_reason(error)}") from error


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, or one in its own directory or repository."""
    directory, arguments = locate_tokenizer(path)
    with translate_load_errors("tokenizer", path):
        tokenizer: PreTrainedTokenizerBase = _read_once(AutoTokenizer, directory, trust_remote_code, arguments)
    return tokenizer


def load_model_config(path: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load a model's transformers config; reject one that is not causal or names a kernel to download."""
    directory, arguments = locate_model(path)
    _check_sizes(path)
    with translate_load_errors("model config", path):
        config: PreTrainedConfig = _read_once(AutoConfig, directory, trust_remote_code, arguments)
    _reject_hub_kernels(config, path)
    _reject_encoders(config, path)
    if not trust_remote_code:  # the run uses transformers' class, whatever code the repository names
        config.__dict__.pop("auto_map", None)
    return config


def _read_once(auto: Any, directory: str, trust_remote_code: bool, arguments: Mapping[str, Any]) -> Any:
    """Read a config or tokenizer; of a GGUF file once per process, because that takes seconds of pure Python."""
    # a run reads both in its checks, for its data and for each model; the caller gets a copy, which it may change
    if "gguf_file" not in arguments:
        return auto.from_pretrained(directory, trust_remote_code=trust_remote_code, **arguments)
    file = (Path(directory) / arguments["gguf_file"]).resolve()
    state = file.stat()
    key = (auto, file, state.st_mtime_ns, state.st_size, trust_remote_code)
    if key not in _read_from_gguf:
        _read_from_gguf[key] = auto.from_pretrained(directory, trust_remote_code=trust_remote_code, **arguments)
    return copy.deepcopy(_read_from_gguf[key])


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the longest supported sequence; None if there is no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def longrope_limit(config: PreTrainedConfig) -> int | None:
    """Return the length from which longrope rotates all sequences of a batch differently; None without longrope."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    is_longrope = isinstance(rope, dict) and rope.get("rope_type") == "longrope"
    return int(rope["original_max_position_embeddings"]) if is_longrope else None


def soft_caps_scores(config: PreTrainedConfig) -> bool:
    """Return whether attention scores are soft-capped, as in Gemma 2; sdpa cannot do that."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def load_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    is_reward_model: bool = False,
) -> PreTrainedModel:
    """Load a causal language model, or a reward model, with dropout disabled."""
    directory, arguments = locate_model(path)
    is_gguf = "gguf_file" in arguments
    config = load_model_config(path, trust_remote_code=trust_remote_code)  # rejects what would run foreign code
    auto_class = class_to_load(config, is_reward_model=is_reward_model)
    find_weight_files(path)  # rejects weights that sharded loading and the digest would read differently
    with translate_load_errors("model", path), _without_load_report():
        loaded: Any = auto_class.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            use_safetensors=None if is_gguf else True,
            ignore_mismatched_sizes=True,  # reported below
            output_loading_info=True,
            # transformers would read the file again for its config, several times
            **({"config": config} if is_gguf or is_reward_model else {}),
            **arguments,
        )
    model: PreTrainedModel = loaded[0]
    _check_loaded(model, path, report=loaded[1])
    if is_gguf:
        model = _without_quantization(model, dtype)
    if REWARD_HEAD in loaded[1]["missing_keys"]:
        nn.init.zeros_(model.get_parameter(REWARD_HEAD))
    return without_dropout(with_soft_caps(model, attn_implementation))


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Do not let transformers print which weights are missing: `_check_loaded` rejects them."""

    def is_no_report(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    # not its level, from which transformers decides whether to check the model's tensor-parallel plan
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(is_no_report)


def class_to_load(config: PreTrainedConfig, *, is_reward_model: bool) -> Any:
    """Return transformers' automatic class for a model, whose config then describes a head of the right size."""
    if not is_reward_model:
        return AutoModelForCausalLM
    config.num_labels = 1
    return AutoModelForSequenceClassification


def with_soft_caps(model: PreTrainedModel, requested: str | None) -> PreTrainedModel:
    """Replace sdpa if scores are soft-capped: transformers 5.19 selects it for Gemma 2 and ignores the cap."""
    if soft_caps_scores(model.config) and model.config._attn_implementation == "sdpa":
        if requested is not None:
            raise UserError(
                f"attn_implementation {requested} ignores the soft cap on attention scores of the model family "
                f"{model.config.model_type}; remove the setting, or set eager"
            )
        model.set_attn_implementation("eager")
    return model


def _check_loaded(model: PreTrainedModel, path: str, report: Mapping[str, Any]) -> None:
    """Reject weights that transformers reports as initialized at random, or would untie against the config."""
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise wrong_shape(path, name, stored, expected)
    for name in sorted(set(report["missing_keys"]) - {REWARD_HEAD}):
        raise missing_tensor(path, name)
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(name) is not model.get_parameter(other):
            raise differently_tied(path, name, other)


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Disable dropout in modules and config, and the key/value cache, which only generation needs."""
    disable_dropout(model)
    # some models read a rate from their config in every forward
    for config in (model.config, model.config.get_text_config()):
        for name, value in vars(config).items():
            if isinstance(value, float) and "drop" in name:
                setattr(config, name, 0.0)
    model.config.use_cache = False
    return model


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate to zero: policy and reference must agree at step 0, and steps must be reproducible."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # many transformers layers store a rate as a float: dropout, attention_dropout, layerdrop, jitter_noise
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(module, name, 0.0)


def set_pad_token(tokenizer: PreTrainedTokenizerBase, pad_token: str | None, path: str) -> int | None:
    """Return the id to pad with: of `model_args.pad_token`, of the tokenizer's pad token, or of EOS; or None."""
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise UserError(f"pad_token {pad_token!r} is not in the vocabulary of {path}; name an existing token")
        tokenizer.pad_token = pad_token
    # padding is masked and never scored, so EOS may be used for it; the tokenizer keeps having no pad token then
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return None if pad_id is None else int(pad_id)


def pad_apart_from_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Pad with a special token that ends no response: transformers takes the reward at the last token that is no pad.

    Without such a token there is no pad token, and the model scores one sequence at a time.
    """
    candidates = [tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token, *tokenizer.all_special_tokens]
    tokenizer.pad_token = next((each for each in candidates if each not in (None, tokenizer.eos_token)), None)


def _check_sizes(path: str) -> None:
    """Reject a config.json that describes no model, before transformers makes a list of a billion layers."""
    file = None if path.endswith(".gguf") else find_file(path, "config.json")
    try:
        values = {} if file is None else json.loads(file.read_bytes())
    except RecursionError as error:
        raise UserError(f"the config.json of {path} is nested too deeply; download the model again") from error
    except (OSError, ValueError):  # transformers reports it
        return
    text = values.get("text_config") if isinstance(values, dict) else None
    for section in (each for each in (values, text) if isinstance(each, dict)):
        for name, largest in _LARGEST_SIZES.items():
            size = section.get(name, 1)
            if isinstance(size, int | float) and not (1 <= size <= largest and size == int(size)):
                raise UserError(
                    f"the config.json of {path} has {name} {size}, which no model has (1 to {largest:,} are possible); "
                    "correct it, or download the model again"
                )


def _reject_hub_kernels(config: PreTrainedConfig, path: str) -> None:
    """Raise if a config names an attention kernel on the hub: transformers would download native code and run it."""
    for nested in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        kernel = getattr(nested, "_attn_implementation", None)
        if kernel is not None and "/" in str(kernel):
            raise UserError(
                f"the config.json of {path} names the attention kernel {kernel}, which would be downloaded and run; "
                "remove it, or set model_args.attn_implementation to the kernel if you trust it"
            )


def _reject_encoders(config: PreTrainedConfig, path: str) -> None:
    """Raise if the model has no causal mask: its logps would depend on the tokens that it predicts."""
    kind = None
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder model"
    elif config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        kind = "an encoder"
    if kind is not None:
        raise UserError(
            f"{path} is {kind} ({config.model_type}), but only causal language models can be trained; use a decoder, "
            "such as a Llama or Qwen model"
        )


def _without_quantization(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Rebuild a dequantized model: transformers refuses to save a model that was loaded from GGUF."""
    values = model.config.to_dict()
    values.pop("quantization_config", None)
    config = AutoConfig.for_model(**values)
    config._attn_implementation = model.config._attn_implementation
    rebuilt: PreTrainedModel = type(model)._from_config(config, dtype=dtype)
    rebuilt.load_state_dict(model.state_dict())
    rebuilt.generation_config = model.generation_config
    return rebuilt


def _reason(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return (
            "it includes Python code, which is not run by default; review the code and, if you trust it, set "
            "actor_train.model_args.trust_remote_code=true (under reference, for a separate reference model)"
        )
    if "Unrecognized configuration class" in str(error):
        if AutoModelForSequenceClassification.__name__ in str(error):
            return "transformers has no sequence-classification model of its type, which a reward model needs"
        return "transformers has no causal language model of its type; use a decoder, such as a Llama or Qwen model"
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first
