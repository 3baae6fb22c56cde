"""Writes a Llama directory to a GGUF file as llama.cpp's converter does, or with faults of a conversion."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(
    file: Path,
    model: Path,
    *,
    permutes: Callable[[str], bool] = lambda name: True,
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    dtype: torch.dtype = torch.float32,
    rope_theta: float | None = None,
    rope_factors: Sequence[float] | None = None,
    tokens: Sequence[str] | None = None,
    special: Mapping[str, Any] = {},
) -> Path:
    """Write a tiny Llama with as many key as query heads.

    permutes: which query and key matrices get the order of rows that llama.cpp rotates. change: what a tensor becomes.
    dtype: of matrices. rope_factors: of the scaling of Llama 3. special: fields of the tokenizer.
    """
    from gguf import GGUFWriter

    config = json.loads((model / "config.json").read_text())
    heads, size = config["num_attention_heads"], config["hidden_size"]
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(size)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(size // heads)
    writer.add_rope_freq_base(rope_theta or config.get("rope_parameters", {}).get("rope_theta", 10000.0))
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if tokens is not None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(list(tokens))
    for name, value in special.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(f"tokenizer.{name}", value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", torch.tensor(rope_factors).numpy())
    for name, tensor in load_file(model / "model.safetensors").items():
        tensor = change(name, tensor.float())
        if ("q_proj" in name or "k_proj" in name) and permutes(name):
            tensor = tensor.reshape(heads, 2, -1, size).transpose(1, 2).reshape(size, size)
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, (tensor.to(dtype) if tensor.dim() > 1 else tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
