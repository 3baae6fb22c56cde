"""The table of architectures in docs/reference/models.md, made from the lists that the tests run on.

Write it with: python -m tests.support.model_table
"""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.support.engines.parity_cases import ALL_CASES
from tests.support.paths import ROOT
from tests.support.probed_families import PACKED, PADDED, SINKS, default_config
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import FAMILIES
from thresher.models.branching_state import branching_layers

PAGE = ROOT / "docs" / "reference" / "models.md"
_BEGIN, _END = "<!-- model architectures: begin -->\n", "<!-- model architectures: end -->"
_MULTIMODAL = " (multimodal, text pairs)"
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
    assert tiny.keys() <= PACKED.keys(), f"give {tiny.keys() - PACKED.keys()} a name"
    for model_type, name in sorted(PACKED.items(), key=lambda item: item[1].lower()):
        axes = ("yes" if (model_type, axis) in along else "" for axis in _AXES.values())
        tested = "yes" if model_type in tiny else ""
        lines.append(f"| {name} | `shared` | {_what_the_probe_covers(model_type)} | {tested} | {' | '.join(axes)} |")
    for model_type, (name, reason) in PADDED.items():
        why = reason.removeprefix(f"the model family {model_type} ")
        why = f"probed: {why}" if why.startswith("layout ") else f"config: {why}"
        lines.append(f"| {name} | `padded` | {why} |  | {' | '.join('' for _ in _AXES)} |")
    return "\n".join(lines) + "\n"


def num_packed_architectures() -> int:
    """Architectures that the probe accepts; a model and its multimodal config are one."""
    return len({name.removesuffix(_MULTIMODAL).removesuffix(" (text)") for name in PACKED.values()})


def _what_the_probe_covers(model_type: str) -> str:
    text = default_config(model_type).get_text_config()
    has_window = bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True)
    parts = {
        "state": bool(branching_layers(MODEL_FOR_CAUSAL_LM_MAPPING[type(default_config(model_type))])),
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
