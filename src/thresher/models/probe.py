"""Start-up probe of a model family: packed rows of a tiny model against the family's own forward.

Real pairs may be shorter than a sliding window, so that a window which is ignored shows only in long rows. The probe
shrinks the model's config to one layer of each kind and a window of a few tokens, gives it random weights, sinks
included, and compares log-probabilities as `check_logps` does for the real model. It needs no weights and no GPU. What
it finds is remembered in the user's cache, by the shrunken config, the versions of libraries and the code in models/. A
probe that fails proves nothing, and is tried again by the next process.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from thresher import durable
from thresher.data.example import Example, ExampleBatch, Response
from thresher.data.store.cache import chosen_cache_dir, user_cache_dir
from thresher.models.branching_state import SCAN_GROUPS, SCAN_HEAD_DIMS, SCAN_HEADS, on_torch_functions
from thresher.models.forward_check import LayoutError, check_logps
from thresher.models.layouts import PackedLayout
from thresher.models.loading.load import without_dropout
from thresher.models.logps import PairModel
from thresher.models.pipeline_chunk import decoder_of, head_of

logger = logging.getLogger(__name__)

DIRECTORY_NAME = ".probes"  # hidden: the other directories of the cache are references
_VOCAB = 96
_REACH = 4  # tokens of a window or chunk, shorter than the prompts of the probe
_UNLIMITED = 1 << 20
_SOFT_CAP = 2.0  # which the scores of the probe exceed
# what attention has besides its scale: the config's fields, their value in the probe, and the one that switches it off
_FEATURES: dict[str, tuple[tuple[str, ...], float, float | None]] = {
    "a sliding window": (("sliding_window", "attention_window_size"), _REACH, _UNLIMITED),
    "attention within chunks": (("attention_chunk_size",), _REACH, _UNLIMITED),
    "attention to selected tokens": (("index_topk", "index_topk_blocks"), _REACH, _UNLIMITED),
    "soft-capped attention scores": (("attn_logit_softcapping",), _SOFT_CAP, None),
}
# fields by a part of their name, and the most that the probe needs
_LARGEST = {
    **dict.fromkeys(("experts_per_tok", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 64),
    "vocab_size": _VOCAB,
    "hidden_size_per_layer_input": 16,
}
_NUM_DENSE = ("first_k_dense_replace", "num_dense_layers")
_INDICES = ("attn_layer_indices", "hybrid_layer_ids", "mlp_only_layers")  # of the layers of some kind
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_found: dict[str, str | None] = {}
_failed: dict[str, Exception] = {}  # in this process


def what_packed_rows_lack(config: PreTrainedConfig) -> str | None:
    """Return what a family's forward does that it does not in packed rows; None if the probe finds nothing.

    A family that cannot be probed is left to the check on real pairs, which every run makes, unless its attention has a
    reach: pairs may be shorter.
    """
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):  # only of a trusted repository
        return _without_proof(config, "the run executes the code of the model's repository")
    try:
        return _remembered(shrink(config))
    except Exception as error:  # whatever the code of a model raises for sizes that nobody has published
        return _without_proof(config, f"the start-up probe failed with {type(error).__name__}: {error}")


def _without_proof(config: PreTrainedConfig, why: str) -> str | None:
    text = config.get_text_config()
    for feature, (names, _, off) in _FEATURES.items():
        if off == _UNLIMITED and any(getattr(text, name, None) for name in names):
            return f"the model family {config.model_type} has {feature}, which may differ in packed rows: {why}"
    _warn_once(
        f"packed rows of the model family {config.model_type} are not proven, because {why}; the run compares two of "
        "its pairs with the model's own forward. Set layout=padded to do without packed rows"
    )
    return None


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def _remembered(small: PreTrainedConfig) -> str | None:
    content = [small.to_dict(), transformers.__version__, torch.__version__, _code_digest()]
    key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
    if key in _failed:
        raise _failed[key]
    if key not in _found:
        path = (chosen_cache_dir(None) or user_cache_dir()) / DIRECTORY_NAME / f"{key}.json"
        record = durable.read_own_record(path) or {}
        if record.get("key") == key and isinstance(lacks := record.get("lacks"), str | None):
            return _found.setdefault(key, lacks)
        try:
            _found[key] = _probe(small)
        except Exception as error:
            _failed[key] = error
            raise
        durable.write_own_record(path, {"key": key, "family": small.model_type, "lacks": _found[key]})
    return _found[key]


def _probe(small: PreTrainedConfig) -> str | None:
    if (error := _error_of(small)) is None:
        return None
    missing = "the model family {} has {}, which packed rows of it ignore"
    for feature, (names, _, off) in _FEATURES.items():
        changed = copy.deepcopy(small)
        text = changed.get_text_config()
        present = [name for name in names if getattr(text, name, None) is not None]
        for name in present:
            setattr(text, name, off)
        if present and _error_of(changed) is None:
            return missing.format(small.model_type, feature)
    if _error_of(small, has_sinks=False) is None:
        return missing.format(small.model_type, "attention sinks")
    return str(error).removesuffix("; use layout=padded")


def _error_of(small: PreTrainedConfig, *, has_sinks: bool = True) -> LayoutError | None:
    """Compare the packed rows of a tiny model with its own forward."""
    model = build_tiny_model(small, has_sinks=has_sinks)
    layout = PackedLayout(shares_prompt=True)
    with on_torch_functions(model):
        model(input_ids=torch.arange(3, 12)[None], use_cache=False)  # a model that the shrinking broke raises here
        try:
            pairs = PairModel.for_layout(model, torch.float32, layout, device=torch.device("cpu"))
            check_logps(pairs, layout, _examples())
        except LayoutError as error:
            # torch raises it for sizes and for memory, neither of which the real model may lack
            if isinstance(error.__cause__, RuntimeError):
                raise error.__cause__ from None
            return error
    return None


def _examples() -> ExampleBatch:
    """Two responses and four, longer and shorter than a window."""
    random = np.random.default_rng(0)
    examples = []
    for lengths in ((7, 6, 9), (5, 3, 8, 1, 5)):
        prompt, *responses = (random.integers(3, _VOCAB, length).astype(np.int32) for length in lengths)
        examples.append(Example(prompt, tuple(map(Response, responses))))
    return ExampleBatch(np.arange(len(examples)), tuple(examples))


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of the same class with one layer of each kind, few heads of the same size, and a short reach."""
    small = copy.deepcopy(config)
    text: Any = small.get_text_config()  # a multimodal config nests the one of its language model
    for each in (small, text):
        each.__dict__.pop("quantization_config", None)
        for name, token in _TOKENS.items():
            if getattr(each, name, None) is not None:
                setattr(each, name, token)
    _keep_one_layer_of_each_kind(text)
    _keep_few_heads(text)
    probed = {name: value for names, value, _ in _FEATURES.values() for name in names}
    for name, value in list(vars(text).items()):
        largest = next((size for part, size in _LARGEST.items() if part in name), None)
        if value and name in probed:
            setattr(text, name, probed[name])
        elif largest is not None and isinstance(value, int) and not isinstance(value, bool):
            # the probe's tokens exist in a smaller vocabulary too
            setattr(text, name, largest if "vocab_size" in name else min(value, largest))
        elif largest is not None and isinstance(value, list):
            setattr(text, name, [min(each, largest) for each in value])
    return small


def _keep_one_layer_of_each_kind(text: Any) -> None:
    count = text.num_hidden_layers
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == count > 1}
    # the last layers of Gemma 3n and 4 use the keys and values of earlier ones, the first ones of DeepSeek and
    # LFM2 are dense
    num_sharing = getattr(text, "num_kv_shared_layers", 0) or 0
    dense = {name: vars(text)[name] for name in _NUM_DENSE if vars(text).get(name)}
    chosen = {name: vars(text)[name] for name in _INDICES if vars(text).get(name)}
    kinds: dict[tuple[Any, ...], int] = {}
    for index in range(count):
        of_list = *(value[index] for value in lists.values()), *(index in value for value in chosen.values())
        kind = (index >= count - num_sharing, index < max(dense.values(), default=0), *of_list)
        kinds.setdefault(kind, index)
    kept = sorted(kinds.values()) if len(kinds) > 1 else list(range(min(count, 2)))
    text.num_hidden_layers = len(kept)
    for name, value in lists.items():
        setattr(text, name, [value[index] for index in kept])
    if num_sharing:
        text.num_kv_shared_layers = sum(index >= count - num_sharing for index in kept)
    for name in dense:
        setattr(text, name, sum(index < dense[name] for index in kept))
    for name, value in chosen.items():
        setattr(text, name, [number for number, index in enumerate(kept) if index in value])


def _keep_few_heads(text: Any) -> None:
    """Keep two key/value heads, or one, with up to two query heads each; the size of a head stays."""
    heads = text.num_attention_heads
    of_keys = getattr(text, "num_key_value_heads", None) or heads
    few = min(of_keys, 2)
    # kernels for experts take rows of a multiple of 16 bytes
    width = math.ceil(text.hidden_size * few * min(heads // of_keys, 2) / heads / 16) * 16
    share = Fraction(width, text.hidden_size)
    _keep_few_scan_heads(text, share)
    for name in ("hidden_size", "attention_hidden_size"):
        if name in vars(text):
            setattr(text, name, int(vars(text)[name] * share))
    text.num_attention_heads = few * min(heads // of_keys, 2)
    for name, value in list(vars(text).items()):
        if "key_value_heads" in name and isinstance(value, int):
            setattr(text, name, min(value, few))


def _keep_few_scan_heads(text: Any, share: Fraction) -> None:
    """Keep this share of the width of Mamba-2's scan, which may be a multiple of the hidden size, in up to 4 heads."""
    present = vars(text)
    names = [next((name for name in each if present.get(name)), "") for each in (SCAN_HEADS, SCAN_HEAD_DIMS)]
    if not all(names):
        return
    heads, head_dim = (present[name] for name in names)
    width = int(heads * head_dim * share)
    few = math.gcd(width, 4)
    for name, size in ((names[0], few), (names[1], width // few), ("mamba_d_ssm", width)):
        if present.get(name):
            setattr(text, name, size)
    for name in SCAN_GROUPS:
        if present.get(name):
            setattr(text, name, math.gcd(present[name], few))


@torch.no_grad()
def build_tiny_model(small: PreTrainedConfig, *, has_sinks: bool = True) -> PreTrainedModel:
    """Build a model with random weights; what is beside the decoder and its head stays on the meta device."""
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(small), dtype=torch.float32, attn_implementation="eager"
        )
    random = torch.Generator().manual_seed(0)
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # a tied one belongs to two modules
    for part in (decoder_of(model), head_of(model)):
        for module in part.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight not in made:
                    values = torch.empty(weight.shape)
                    if name.endswith("sinks") and not has_sinks:
                        values.fill_(-1e4)
                    elif weight.ndim > 1:
                        values.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5, generator=random)
                    else:  # norms, biases and sinks
                        values.uniform_(0.5, 1.5, generator=random)
                    made[weight] = torch.nn.Parameter(values)
                setattr(module, name, made[weight])
    model.tie_weights()
    model.eval()
    return without_dropout(model)


@cache
def _code_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
