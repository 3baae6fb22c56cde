"""Models and sizes that Megatron-Core cannot compute are rejected from the config alone, without megatron-core."""

from __future__ import annotations

import copy

import pytest

from tests.support.tiny_models import FAMILIES
from thresher.engines.megatron.declaration import MegatronSizes
from thresher.engines.megatron.transformer_config import check_sizes, describe_model
from thresher.errors import UserError


def changed(family: str, **changes: object):
    config = copy.deepcopy(FAMILIES[family])
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "llama_stray_window"])
def test_supported_families(family):
    shape = describe_model(FAMILIES[family], "model")
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 8)
    assert shape.num_experts == (4 if family == "qwen3_moe" else 0)


def test_mistral_without_a_window_is_supported():
    assert describe_model(changed("mistral", sliding_window=None), "model").num_layers == 2


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gemma2", {}, "model type gemma2"),
        ("mistral", {}, "sliding_window 6"),
        ("qwen2_windowed", {}, "sliding_window 6"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_would_be_ignored_is_an_error(family, changes, named):
    with pytest.raises(UserError, match=named) as error:
        describe_model(changed(family, **changes), "model")
    assert "fsdp2_train" in str(error.value)


@pytest.mark.parametrize(
    ("family", "sizes", "named"),
    [
        ("llama", MegatronSizes(tp=8), "tensor_model_parallel_size 8"),
        ("llama", MegatronSizes(tp=3), "tensor_model_parallel_size 3"),
        ("llama", MegatronSizes(cp=3), "context_parallel_size 3"),
        (
            "llama",
            MegatronSizes(tp=2, cp=4),
            "context_parallel_size 4 does not split the 2 attention heads and 1 key/value heads of model per",
        ),
        ("llama", MegatronSizes(pp=3), "2 layers"),
        ("llama", MegatronSizes(pp=2, virtual_pp=2), "4 pipeline chunks"),
        ("llama", MegatronSizes(ep=2), "expert_model_parallel_size has no effect"),
        ("qwen3_moe", MegatronSizes(ep=3), "expert_model_parallel_size 3"),
        ("qwen3_moe", MegatronSizes(tp=2), "sequence_parallel"),
    ],
)
def test_sizes_that_do_not_split_the_model_are_an_error(family, sizes, named):
    with pytest.raises(UserError, match=named):
        check_sizes(describe_model(FAMILIES[family], "model"), sizes, "model")


@pytest.mark.parametrize(
    "sizes", [MegatronSizes(tp=4), MegatronSizes(tp=2, pp=2), MegatronSizes(cp=2), MegatronSizes(cp=4)]
)
def test_sizes_that_split_the_model(sizes):
    check_sizes(describe_model(FAMILIES["llama"], "model"), sizes, "model")
