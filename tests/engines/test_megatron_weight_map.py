"""The map of Megatron-Core parameters to transformers tensors, without megatron-core."""

from __future__ import annotations

import pytest
import torch

from thresher.engines.megatron.weights import ModelShape, WeightMap

SHAPE = ModelShape(vocab_size=10, hidden_size=6, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=2, ffn_size=8)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_query_key_and_value_rows_alternate_by_group(tp):
    query, key, value = torch.arange(48.0).view(8, 6), torch.arange(100, 124.0).view(4, 6), torch.ones(4, 6)
    interleaved = torch.cat([query[:4], key[:2], value[:2], query[4:], key[2:], value[2:]])
    found = {"q_proj": torch.zeros(8, 6), "k_proj": torch.zeros(4, 6), "v_proj": torch.zeros(4, 6)}
    for rank, local in enumerate(interleaved.chunk(tp)):
        weights = WeightMap(SHAPE, tp_rank=rank, tp_size=tp)
        for piece in weights.pieces("decoder.layers.0.self_attention.linear_qkv.weight", local):
            found[piece.hf_name.split(".")[-2]][piece.slices] = piece.values()
    assert torch.equal(found["q_proj"], query)
    assert torch.equal(found["k_proj"], key)
    assert torch.equal(found["v_proj"], value)


def test_a_piece_writes_into_its_tensor():
    moment = torch.zeros(16)
    weights = WeightMap(SHAPE)
    query, *_ = weights.pieces("decoder.layers.0.self_attention.linear_qkv.bias", moment)
    query.copy_(torch.arange(8.0))
    assert moment.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 4, 5, 6, 7, 0, 0, 0, 0]


def test_layers_are_numbered_from_the_first_of_the_chunk():
    weights = WeightMap(SHAPE, first_layer=3)
    (piece,) = weights.pieces("decoder.layers.1.input_layernorm.weight", torch.zeros(6))
    assert piece.hf_name == "model.layers.4.input_layernorm.weight"


def test_an_unknown_parameter_is_an_error():
    with pytest.raises(KeyError, match="no counterpart"):
        WeightMap(SHAPE).pieces("decoder.layers.0.mlp.bias", torch.zeros(1))
