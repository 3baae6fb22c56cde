"""Which layout a model can have: the fastest that its family allows, with the reason where it is not `shared`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from thresher.errors import UserError
from thresher.models.layouts.layout import Layout
from thresher.models.layouts.packed import PackedLayout
from thresher.models.layouts.padded import PaddedLayout

LayoutName = Literal["auto", "shared", "packed", "padded"]
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# families known to tell the attention function of their window; others put it into the mask, which packed rows lack
_WINDOWS_TOLD = {"mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"}


def choose_layout(
    wish: LayoutName, families: Sequence[PreTrainedConfig], attn_implementation: str | None, pad_id: int
) -> tuple[Layout, str | None]:
    """Return the layout that all families bear and, where `auto` had to step back, one line that says why."""
    obstacles = [why_not_packable(family, attn_implementation) for family in families]
    obstacle = next((found for found in obstacles if found is not None), None)
    if wish == "padded" or (wish == "auto" and obstacle is not None):
        return PaddedLayout(pad_id), None if obstacle is None else f"layout padded, because {obstacle}"
    if obstacle is not None:
        raise UserError(f"layout {wish} is not possible, because {obstacle}; use layout=auto or layout=padded")
    return PackedLayout(shares_prompt=wish != "packed"), None


def why_not_packable(family: PreTrainedConfig, attn_implementation: str | None) -> str | None:
    """Say what keeps a family from sharing a row between sequences; None where nothing does.

    Packing needs attention to be the only way from token to token, and to go through transformers' interface.
    """
    name = family.model_type
    if attn_implementation is not None:
        return f"attn_implementation is set to {attn_implementation}, and packed rows need our own"
    if type(family) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"transformers does not know the model family {name}"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(family)]
    text = family.get_text_config()  # models of several modalities keep their language part inside
    strange = set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYERS
    if getattr(model_class, "_is_stateful", False) or strange:
        kinds = ", ".join(sorted(strange)) or "recurrent"
        return f"the model family {name} has {kinds} layers, which carry state from token to token"
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"the model family {name} does not go through transformers' attention interface"
    if name == "gpt_oss":
        return f"the attention of the model family {name} has sinks"
    if getattr(text, "sliding_window", None) is not None and name not in _WINDOWS_TOLD:
        return f"the model family {name} has a sliding window that it may keep in its mask alone"
    return None
