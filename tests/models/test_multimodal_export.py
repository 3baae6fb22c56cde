"""A text run on a multimodal checkpoint keeps all that it does not train, bit for bit, in its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig

from tests.support.small_tokenizer import CHAT_TEMPLATE, make_tokenizer
from tests.support.tiny_chat_model import quickstart_rows
from tests.support.tiny_models import GROUPED
from thresher.builders.export import export_checkpoint, never_loaded
from thresher.config import parse_config
from thresher.pipeline import DPOPipeline

MTP = "mtp.norm.weight"
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
# the text config, the vision config, others; transformers loads Gemma 3 whole for a text run, the others without vision
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        {**_VISION, "image_size": 28, "patch_size": 14},
        {"mm_tokens_per_image": 4},
    ),
    "llama4": (
        {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 64},
        {
            **_VISION,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        {},
    ),
    "qwen3_5": (
        {
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 14,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
        {},
    ),
}


def save_multimodal_model(directory: Path, family: str) -> None:
    tokenizer = make_tokenizer(pad_token="</s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    text, vision, others = CONFIGS[family]
    tokens = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    sizes = {**GROUPED, "vocab_size": len(tokenizer), "max_position_embeddings": 512, **tokens}
    config = CONFIG_MAPPING[family](text_config={**sizes, **text}, vision_config=vision, **others)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # of multi-token prediction, which transformers does not load
    if family == "qwen3_5":
        file = directory / "model.safetensors"
        save_file(load_file(file) | {MTP: torch.ones(4)}, file, metadata={"format": "pt"})
    (directory / "preprocessor_config.json").write_text('{"image_processor_type": "made for this test"}')


@pytest.mark.parametrize("family", CONFIGS)
def test_the_vision_tower_is_exported_bit_for_bit(family, tmp_path, caplog):
    save_multimodal_model(tmp_path / "base", family)
    (tmp_path / "rows.json").write_text(json.dumps(quickstart_rows(8)))
    training = {"learning_rate": 0.01, "lr_scheduler_type": "constant", "weight_decay": 0.1}
    config = parse_config(
        {
            "pretrain": str(tmp_path / "base"),
            "output_dir": str(tmp_path / "run"),
            "max_steps": 1,
            "track_with": [],
            "actor_train": {
                "model_args": {"dtype": "fp32"},
                "data_args": {"file_name": str(tmp_path / "rows.json"), "template": "raw"},
                "training_args": training,
            },
        }
    )
    DPOPipeline(config).run()
    export_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000001", tmp_path / "export")

    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "export"))
    is_warned = "that transformers does not load, such as mtp.norm.weight" in caplog.text
    assert (before.pop(MTP, None) is not None) == is_warned == (family == "qwen3_5")
    assert after.keys() == before.keys()
    of_text = {name for name in before if "language_model" in name or "lm_head" in name}
    assert 0 < len(of_text) < len(before)
    assert {name for name in before if not torch.equal(before[name], after[name])} >= {
        name for name in of_text if name.endswith("o_proj.weight")
    }
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - of_text)
    assert (tmp_path / "export" / "preprocessor_config.json").is_file()
    card = (tmp_path / "export" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert "AutoModelForImageTextToText.from_pretrained" in card

    ids = torch.arange(3, 20)[None]
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "export").eval()
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with torch.no_grad():
        scores = [model(input_ids=ids).logits for model in (whole, text, base)]
    torch.testing.assert_close(scores[0], scores[1])
    assert (scores[0] - scores[2]).abs().max() > 0.01


def test_a_layer_of_the_model_is_not_reported_as_left_out(tmp_path):
    """transformers ignores the layer after the last one by its number, which a larger model has."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**GROUPED))
    model.save_pretrained(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.1\."]
    assert never_loaded(model, str(tmp_path)) == []
    model.config.num_hidden_layers = 1
    assert {name.partition("layers.")[2][0] for name in never_loaded(model, str(tmp_path))} == {"1"}
