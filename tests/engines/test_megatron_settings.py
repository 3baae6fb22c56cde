"""Megatron-Core's settings: Megatron's names, and an error for what has no effect or is not supported."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save_file
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from tests.support.paths import shared_path
from thresher.config.roles import ModelArgs, TrainingArgs
from thresher.distributed.groups import Group
from thresher.engines.megatron.declaration import SET_BY_THRESHER, MegatronSettings, MegatronSizes
from thresher.engines.megatron.transformer_config import check
from thresher.engines.spec import ModelSpec
from thresher.errors import UserError
from thresher.models.layouts import PackedLayout, PaddedLayout
from thresher.models.loading.adapters import LoraSettings
from thresher.models.loading.trained import TrainedParts

SHAPE = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = LlamaConfig(**SHAPE, **HEADS)
EXPERTS = Qwen3MoeConfig(**SHAPE, **HEADS, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)


@pytest.mark.real
@pytest.mark.parametrize("role", ["actor_train", "reference"])
@pytest.mark.parametrize("name", ["qwen2.5-3B_dpo_megatron.yaml", "qwen3-30BA3B-dpo_megatron_80GB.yaml"])
def test_the_settings_of_rolls_examples_are_accepted(name, role):
    config = yaml.safe_load(shared_path("peer-configs", "roll", name).read_text())
    given = config[role]["strategy_args"]["strategy_config"]
    settings = MegatronSettings(**given)
    assert settings.sizes == MegatronSizes(
        pp=given["pipeline_model_parallel_size"], ep=given["expert_model_parallel_size"]
    )
    assert settings.recompute_granularity == given.get("recompute_granularity")
    assert settings.moe_permute_fusion == ("additional_configs" in given)


def test_short_names_are_those_of_megatron():
    short = MegatronSettings(tp_size=2, pp_size=4, virtual_pp_size=2, cp_size=2, ep_size=8, etp_size=1)
    assert short == MegatronSettings(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        context_parallel_size=2,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
    )
    assert short.workers_per_data_rank == 16
    assert short.splits_rows


def test_modules_to_recompute_are_a_list_or_a_text():
    text = MegatronSettings(recompute_granularity="selective", recompute_modules="moe, layernorm")
    assert text == MegatronSettings(recompute_granularity="selective", recompute_modules=["moe", "layernorm"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp_size": 2, "tensor_model_parallel_size": 2}, "the same setting"),
        ({"virtual_pp_size": 2}, "has no effect without pipeline_model_parallel_size"),
        ({"overlap_param_gather": True}, "needs use_distributed_optimizer and overlap_grad_reduce"),
        ({"recompute_method": "block"}, "has no effect without recompute_granularity full"),
        ({"recompute_modules": "moe"}, "has no effect without recompute_granularity selective"),
        ({"recompute_granularity": "selective", "recompute_modules": "moe_act"}, "core_attn"),
        ({"bf16": True, "fp16": True}, "exclude each other"),
        ({"etp_size": 2}, "Input should be 1"),
        ({"additional_configs": {"num_layers": 3}}, "additional_configs.num_layers follows from the model"),
        ({"additional_configs": {"bf16": True}, "bf16": True}, "additional_configs.bf16 and bf16 are the same setting"),
        ({"tensor_parallel": 2}, "Extra inputs are not permitted"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, "Input should be 'core_attn'"),
    ],
)
def test_settings_without_effect_are_rejected(given, message):
    with pytest.raises(ValidationError, match=message):
        MegatronSettings(**given)


def test_workers_are_a_multiple_of_the_axes():
    with pytest.raises(ValueError, match="has 6 workers, which is not a multiple of tensor_model_parallel_size 2 x "):
        MegatronSettings(tp_size=2, pp_size=2).check_workers(6)
    with pytest.raises(ValueError, match="4 workers per pipeline stage, which is not a multiple of expert_model_"):
        MegatronSettings(pp_size=2, ep_size=8).check_workers(8)
    MegatronSettings(tp_size=2, pp_size=2, ep_size=4).check_workers(8)


@pytest.fixture
def spec_of(tmp_path):
    def make(config: PreTrainedConfig = LLAMA, settings: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
        config.save_pretrained(tmp_path)
        save_file({}, tmp_path / "model.safetensors")
        spec = ModelSpec(
            settings=MegatronSettings(**settings or {}),
            world=Group(size=4),
            device=torch.device("cpu"),
            path=str(tmp_path),
            find_layout=lambda: PackedLayout(shares_prompt=True),
            dtype="bf16",
            master_dtype="fp32",
        )
        return replace(spec, **changes)

    return make


def lora(init: str = "default", dropout: float = 0.0) -> TrainedParts:
    return TrainedParts(lora=LoraSettings(4, None, ["all-linear"], init), lora_dropout=dropout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": Gemma2Config(**SHAPE, **HEADS)}, "model type gemma2; supported are llama"),
        ({"settings": {"tp_size": 3}}, "tensor_model_parallel_size 3 does not split"),
        ({"settings": {"pp_size": 3}}, "4 layers, which are not a multiple of 3 pipeline chunks"),
        ({"settings": {"ep_size": 2}}, "expert_model_parallel_size has no effect"),
        ({"config": EXPERTS, "settings": {"ep_size": 3}}, "does not divide the 8 experts"),
        ({"config": EXPERTS, "settings": {"tp_size": 2}}, "set sequence_parallel to true"),
        ({"settings": {"fp16": True}}, "strategy_config.fp16 is true, but model_args.dtype is bf16"),
        ({"settings": {"bf16": False}}, "strategy_config.bf16 is false, but model_args.dtype is bf16"),
        ({"master_dtype": "bf16"}, "master_dtype is bf16, but megatron_train always updates fp32"),
        ({"model_args": ModelArgs(moe_aux_loss_coef=0.1)}, "moe_aux_loss_coef is not supported by megatron_train"),
        ({"training": TrainingArgs(torch_compile=True)}, "torch_compile is not supported"),
        ({"is_synced": True}, "reference.sync_steps"),
        (
            {"settings": {"cp_size": 2}, "find_layout": lambda: PaddedLayout(pad_id=0)},
            "context parallelism needs packed rows",
        ),
        ({"settings": {"cp_size": 3}}, "context_parallel_size 3 does not split the 4 attention heads"),
        ({"trained": lora(dropout=0.1)}, "lora_dropout is not supported"),
        ({"trained": lora(init="pissa")}, "lora_init pissa"),
        ({"trained": lora(), "settings": {"tp_size": 4}}, "divides the 2 key/value heads"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_megatron_cannot_compute_is_rejected_before_workers_start(spec_of, arguments, message):
    with pytest.raises(UserError, match=message):
        check(spec_of(**arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"settings": {"tp_size": 2, "pp_size": 2, "virtual_pp_size": 2, "bf16": True}},
        {"config": EXPERTS, "settings": {"tp_size": 2, "ep_size": 4, "sequence_parallel": True}},
        {"trained": lora(), "settings": {"tp_size": 2, "cp_size": 2}},
        {"section": "reference", "master_dtype": "bf16"},
    ],
)
def test_supported_runs_pass_the_check(spec_of, arguments):
    check(spec_of(**arguments))


def test_no_field_that_thresher_sets_can_be_changed():
    pytest.importorskip("megatron.core", reason="the extra megatron is not installed")
    from megatron.core.transformer.transformer_config import TransformerConfig

    from thresher.engines.megatron.transformer_config import describe_model, transformer_config

    known = {field.name for field in fields(TransformerConfig)}
    assert set(SET_BY_THRESHER) <= known
    untouched = TransformerConfig(num_layers=4, hidden_size=48, num_attention_heads=4)
    arguments = (MegatronSettings(), "off", torch.float32, torch.device("cpu"))
    ours = transformer_config(EXPERTS, describe_model(EXPERTS, "model"), *arguments)
    # what differs from Megatron-Core's default was set by thresher, or follows from that
    changed = {name for name in known if getattr(ours, name) != getattr(untouched, name)}
    settings = set(MegatronSettings.model_fields)
    derived = {"init_method", "output_layer_init_method", "embedding_init_method", "bias_dropout_fusion"}
    assert changed - set(SET_BY_THRESHER) - settings - derived == set()
