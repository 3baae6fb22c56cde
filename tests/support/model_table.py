"""The table of tested architectures in docs/reference/models.md, made from the lists that the tests run on.

Write it with: python -m tests.support.model_table
"""

from __future__ import annotations

from tests.support.engines.parity_cases import ALL_CASES
from tests.support.paths import ROOT
from tests.support.stateful_models import STATEFUL
from tests.support.tiny_models import FAMILIES

PAGE = ROOT / "docs" / "reference" / "models.md"
_BEGIN, _END = "<!-- model architectures: begin -->\n", "<!-- model architectures: end -->"
_NAMES = {
    "llama": "Llama",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gemma3": "Gemma 3 (multimodal, text pairs)",
    "gemma3n_text": "Gemma 3n (text)",
    "gemma4_text": "Gemma 4 (text)",
    "gemma4": "Gemma 4 (multimodal, text pairs)",
    "phi3": "Phi-3",
    "gpt_neox": "GPT-NeoX",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
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
_AXES = {"FSDP2": "dp_shard", "tensor": "tp", "context": "cp", "pipeline": "pp"}


def model_table() -> str:
    """One row per architecture: every one is tested for log-probabilities, gradients and layouts, some along axes."""
    tested = {config.model_type for config in (*FAMILIES.values(), *STATEFUL.values())}
    along = {(case.family, axis) for case in ALL_CASES for axis in _AXES.values() if getattr(case.sizes, axis) > 1}
    lines = [
        f"| architecture | logps, gradients, `shared` and `packed` layouts | {' | '.join(_AXES)} |",
        f"|---|---|{'---|' * len(_AXES)}",
    ]
    for model_type, name in _NAMES.items():
        if model_type in tested:
            axes = ("yes" if (model_type, axis) in along else "" for axis in _AXES.values())
            lines.append(f"| {name} | yes | {' | '.join(axes)} |")
    assert tested <= _NAMES.keys(), f"give {tested - _NAMES.keys()} a name"
    return "\n".join(lines) + "\n"


def written_table(text: str) -> str:
    return text.partition(_BEGIN)[2].partition(_END)[0]


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    after = before.replace(_BEGIN + written_table(before) + _END, _BEGIN + model_table() + _END)
    PAGE.write_text(after, encoding="utf-8")
