"""Choose the fastest layout that a model family supports, with the reason if it is not `shared`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from thresher.errors import UserError
from thresher.models.layouts.layout import Layout
from thresher.models.layouts.packed import PackedLayout
from thresher.models.layouts.padded import PaddedLayout
from thresher.models.loading.load import soft_caps_scores

VARLEN = "varlen"  # `attn_implementation` of packed rows; all others are those of transformers
LayoutName = Literal["auto", "shared", "packed", "padded"]
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def choose_layout(
    requested: LayoutName,
    configs: Sequence[PreTrainedConfig],
    attn_implementation: str | None,
    pad_id: int | None,
    *,
    scores_prompt: bool = False,
) -> tuple[Layout, str | None]:
    """Return a layout that all models support and, if packing is not possible, a line that says why.

    configs: the transformers config of every model that scores with the layout. pad_id: only for padded rows.
    """
    requested_kernel = transformers_attention(attn_implementation)
    reason = next(filter(None, (_why_not_packable(config, requested_kernel) for config in configs)), None)
    vocab_size = min(filter(None, (vocab_size_of(config) for config in configs)), default=None)
    if attn_implementation == VARLEN:
        _check_varlen(requested, configs, reason)
    if requested == "padded" or (requested == "auto" and reason is not None):
        if pad_id is None:
            raise UserError(
                "layout padded needs a pad token, and the tokenizer has neither a pad token nor EOS; name an existing "
                "token with actor_train.model_args.pad_token"
            )
        return PaddedLayout(
            pad_id, vocab_size, scores_prompt
        ), None if reason is None else f"using layout padded: {reason}"
    if reason is not None:
        raise UserError(f"layout {requested} is not possible: {reason}; use layout=auto or layout=padded")
    return PackedLayout(requested != "packed", vocab_size, scores_prompt, attn_implementation == VARLEN), None


def transformers_attention(attn_implementation: str | None) -> str | None:
    """Return what transformers loads a model with; the attention of packed rows replaces it later."""
    return None if attn_implementation == VARLEN else attn_implementation


def vocab_size_of(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens that a model has embeddings for; None if its config does not say."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def _check_varlen(requested: LayoutName, configs: Sequence[PreTrainedConfig], reason: str | None) -> None:
    """Reject `varlen` where rows are not packed or its kernels cannot compute the attention."""
    if requested == "padded":
        reason = "the layout is padded"
    for text in (config.get_text_config() for config in configs):
        if getattr(text, "sliding_window", None) is not None:
            reason = f"the model family {text.model_type} has a sliding window"
        elif soft_caps_scores(text):
            reason = f"the model family {text.model_type} caps its attention scores"
    if reason is not None:
        raise UserError(
            f"attn_implementation is set to {VARLEN}, but {reason}; remove attn_implementation: packed rows need none"
        )


def _why_not_packable(config: PreTrainedConfig, attn_implementation: str | None) -> str | None:
    """Return why a model cannot have several sequences in one row; None if it can.

    Packing requires that only attention mixes tokens, and that it is called through transformers' interface.
    """
    name = config.model_type
    if attn_implementation is not None:
        return f"attn_implementation is set to {attn_implementation}, and packed rows need thresher's attention"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"transformers has no causal LM for the model family {name}"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text = config.get_text_config()  # multimodal models nest the config of their language model
    unknown = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS
    if unknown == {"chunked_attention"}:
        return f"the model family {name} attends within chunks of a sequence"
    if getattr(model_class, "_is_stateful", False) or unknown:
        kinds = ", ".join(sorted(unknown)) or "recurrent"
        return f"the model family {name} has {kinds} layers, which carry state from token to token"
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"the model family {name} does not use transformers' attention interface"
    if name == "gpt_oss":
        return f"the model family {name} uses attention sinks"
    return None
