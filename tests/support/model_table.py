"""The table of architectures in docs/reference/models.md, made from the lists that the tests run on.

Write it with: python -m tests.support.model_table
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from tests.support.engines.parity_cases import ALL_CASES
from tests.support.paths import ROOT
from tests.support.probed_families import PACKED, PADDED, SINKS, default_config
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import FAMILIES

PAGE = ROOT / "docs" / "reference" / "models.md"
_BEGIN, _END = "<!-- model architectures: begin -->\n", "<!-- model architectures: end -->"
# families that have a tiny model, and no default config that the probe is tested on
_OTHER_NAMES = {
    "qwen2_moe": "Qwen2-MoE",
    "gpt_neox": "GPT-NeoX",
    "olmo2": "OLMo 2",
    "granite": "Granite",
    "cohere": "Cohere",
    "opt": "OPT",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_5_moe_text": "Qwen3.5-MoE",
    "olmo_hybrid": "OLMo hybrid",
    "nemotron_h": "Nemotron-H",
    "granitemoehybrid": "Granite 4",
    "falcon_h1": "Falcon-H1",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE",
}
_SLIDING = ["sliding_attention"]
_AXES = {"FSDP2": "dp_shard", "tensor": "tp", "context": "cp", "pipeline": "pp"}


def model_table() -> str:
    """One row per architecture: its layout and why, whether its gradients are tested, and along which axes."""
    tiny = {config.model_type: config for config in (*FAMILIES.values(), *STATEFUL.values())}
    along = {(case.family, axis) for case in ALL_CASES for axis in _AXES.values() if getattr(case.sizes, axis) > 1}
    lines = [
        f"| architecture | layout | why | gradients | {' | '.join(_AXES)} |",
        f"|---|---|---|---|{'---|' * len(_AXES)}",
    ]
    names = PACKED | _OTHER_NAMES
    assert tiny.keys() <= names.keys(), f"give {tiny.keys() - names.keys()} a name"
    for model_type, name in sorted(names.items(), key=lambda item: item[1].lower()):
        config = default_config(model_type) if model_type in PACKED else tiny[model_type]
        axes = ("yes" if (model_type, axis) in along else "" for axis in _AXES.values())
        tested = "yes" if model_type in tiny else ""
        lines.append(f"| {name} | `shared` | {_what_the_probe_covers(config)} | {tested} | {' | '.join(axes)} |")
    for model_type, (name, reason) in PADDED.items():
        why = reason.removeprefix(f"the model family {model_type} ")
        lines.append(f"| {name} | `padded` | {why} |  | {' | '.join('' for _ in _AXES)} |")
    return "\n".join(lines) + "\n"


def _what_the_probe_covers(config: PreTrainedConfig) -> str:
    text = config.get_text_config()
    if text.model_type in STATEFUL:
        return "state branches"
    has_window = bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
    parts = {
        "sliding window": has_window and "sliding_attention" in (getattr(text, "layer_types", None) or _SLIDING),
        "soft-capped scores": getattr(text, "attn_logit_softcapping", None) is not None,
        "attention sinks": text.model_type in SINKS,
        "latent keys and values": getattr(text, "kv_lora_rank", None) is not None,
    }
    return "probed: " + (", ".join(name for name, is_there in parts.items() if is_there) or "plain attention")


def written_table(text: str) -> str:
    return text.partition(_BEGIN)[2].partition(_END)[0]


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = before.replace(_BEGIN + written_table(before) + _END, _BEGIN + model_table() + _END)
    PAGE.write_text(after, encoding="utf-8")
