"""Invalid parallel sizes are rejected before any worker starts, with the valid ones."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, OPTConfig, Qwen3MoeConfig

from tests.support.tiny_models import FAMILIES
from thresher.builders.engines import check_engine
from thresher.config import parse_config
from thresher.distributed.mesh import ParallelDims
from thresher.engines.native import build
from thresher.errors import UserError

SHAPE = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 4}


@pytest.fixture
def config(tmp_path):
    def make(model_config=None, *, num_workers=4, role="actor_train", layout="auto", strategy=None, **axes):
        model_config = model_config or LlamaConfig(**SHAPE, num_attention_heads=12, num_key_value_heads=6)
        model_config.save_pretrained(tmp_path / "model")
        save_file({}, tmp_path / "model" / "model.safetensors")
        args = {"strategy_config": axes} | ({} if strategy is None else {"strategy_name": strategy})
        return parse_config(
            {
                "pretrain": str(tmp_path / "model"),
                "layout": layout,
                role: {"num_workers": num_workers, "strategy_args": args},
            }
        )

    return make


def check_engines(config) -> None:
    for section in ("actor_train", "reference"):
        check_engine(config, section)


def error_message(config) -> str:
    with pytest.raises(UserError) as caught:
        check_engines(config)
    return str(caught.value)


def axis_sizes(role) -> ParallelDims:
    return build.axis_sizes(role.strategy_args.settings, role.num_processes)


def test_remaining_workers_go_to_dp_shard(config):
    assert axis_sizes(config(num_workers=8, tp_size=2).actor_train) == ParallelDims(dp_shard=4, tp=2)
    assert axis_sizes(config(num_workers=8, dp_replicate=2).actor_train) == ParallelDims(dp_replicate=2, dp_shard=4)
    assert config(num_workers=8, dp_replicate=8).actor_train.is_replicated
    assert config(num_workers=8, role="reference").reference.is_replicated
    assert not config(num_workers=8, role="reference", strategy="fsdp2_infer").reference.is_replicated
    sharded = config(num_workers=8, role="reference", strategy="fsdp2_infer", tp_size=2).reference
    assert axis_sizes(sharded) == ParallelDims(dp_shard=4, tp=2)


def test_pairs_per_step_scale_with_data_ranks_not_workers(config):
    assert config(num_workers=8).pairs_per_step == 8 * 8
    assert config(num_workers=8, tp_size=2, cp_size=2).pairs_per_step == 2 * 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_workers": 6, "tp_size": 4},
            "actor_train has 6 workers, which is not a multiple of tp_size 4; use 4 or 8 workers (device_mapping, or "
            "num_workers on CPUs), or smaller parallel sizes",
        ),
        (
            {"num_workers": 1, "tp_size": 2, "pp_size": 2},
            "actor_train has 1 worker, which is not a multiple of pp_size 2 x tp_size 2 = 4; use 4 workers "
            "(device_mapping, or num_workers on CPUs), or smaller parallel sizes",
        ),
        (
            {"tp_size": 4},
            "actor_train: tp_size is 4, but the model has 12 attention heads and 6 key/value heads; valid sizes are "
            "1, 2, 3, 6",
        ),
        (
            {"num_workers": 8, "tp_size": 2, "cp_size": 4},
            "actor_train: cp_size is 4, but the model has 6 attention heads and 3 key/value heads per tp rank; valid "
            "sizes are 1, 3, 6",
        ),
        (
            {"cp_size": 2, "layout": "padded"},
            "actor_train: cp_size is 2, but the layout is padded, and context parallelism needs packed rows; remove "
            "cp_size, or use layout=shared or layout=packed if the model supports it",
        ),
        (
            {"tp_size": 2, "sequence_parallel": True, "layout": "padded"},
            "actor_train: sequence_parallel is set, but the layout is padded, and it needs packed rows; remove "
            "sequence_parallel",
        ),
        (
            {"num_workers": 4, "pp_size": 2, "pp_schedule": "zero_bubble"},
            "actor_train.strategy_args.strategy_config.pp_schedule zero_bubble does not support workers that shard the "
            "model: set cp_size to 1, and dp_replicate to the number of workers divided by pp_size x tp_size",
        ),
        (
            {"num_workers": 8, "pp_size": 8},
            "actor_train: pp_size 8 with virtual_pp_size 1 makes 8 stages, but the model has 4 layers; use at most 4 "
            "stages",
        ),
        (
            {"pp_size": 2, "virtual_pp_size": 3},
            "actor_train: pp_size 2 with virtual_pp_size 3 makes 6 stages, but the model has 4 layers; use at most 4 "
            "stages",
        ),
        (
            {"role": "reference", "tp_size": 2},
            "reference.strategy_args.strategy_config has no effect with hf_infer, which keeps a full copy per worker; "
            "remove it, or set strategy_name to fsdp2_infer",
        ),
    ],
    ids=lambda value: " ".join(f"{name}={size}" for name, size in value.items()) if isinstance(value, dict) else "",
)
def test_invalid_sizes_are_rejected_with_the_valid_ones(config, settings, message):
    assert error_message(config(**settings)) == message


@pytest.mark.parametrize("axes", [{"reduce_dtype": "bf16"}, {"pp_size": 2, "pp_dtype": "bf16"}], ids=str)
def test_bf16_messages_of_a_run_in_fp32_are_rejected(config, axes):
    role = {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_config": axes}, "num_workers": 2}
    name = next(reversed(axes))
    assert error_message(parse_config({"pretrain": config().pretrain, "actor_train": role})) == (
        f"actor_train: {name} bf16 needs dtype bf16 and master_dtype fp32, and they are fp32 and fp32; remove {name}"
    )


@pytest.mark.parametrize(
    "model_config",
    [
        OPTConfig(vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4),
        FAMILIES["gpt_oss"],
    ],
    ids=lambda model_config: model_config.model_type,
)
def test_an_architecture_without_a_tp_plan_is_rejected(config, model_config):
    assert error_message(config(model_config, num_workers=2, tp_size=2)) == (
        "actor_train: tp_size is 2, but transformers has no tensor-parallel plan for the architecture "
        f"{model_config.model_type}; remove tp_size"
    )


def test_sequence_parallelism_of_another_architecture_is_rejected(config):
    model_config = GPTNeoXConfig(**SHAPE, num_attention_heads=4)
    assert error_message(config(model_config, num_workers=2, tp_size=2, sequence_parallel=True)) == (
        "actor_train: sequence_parallel is set, but the architecture is gpt_neox, and it supports llama, mistral, "
        "qwen2, qwen3; remove sequence_parallel"
    )


def test_an_architecture_with_a_tp_plan_is_accepted(config):
    model_config = GPTNeoXConfig(**SHAPE, num_attention_heads=4)
    made = config(model_config, num_workers=2, tp_size=2)
    AutoModelForCausalLM.from_config(model_config).save_pretrained(made.pretrain)
    check_engines(made)


def test_a_single_file_model_can_be_replicated_but_not_sharded(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    values = {"pretrain": str(path), "actor_train": {"num_workers": 2}}
    assert error_message(parse_config(values)) == (
        f"{path} cannot be sharded: it is a GGUF file; convert it to safetensors, or set "
        "strategy_args.strategy_config.dp_replicate to the number of workers for a full copy per worker"
    )
    values["actor_train"]["strategy_args"] = {"strategy_config": {"dp_replicate": 2}}
    check_engines(parse_config(values))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor_parallel_size": 2}, "strategy_config has no key tensor_parallel_size; known: tp_size, pp_size"),
        ({"tp_size": 0}, "strategy_config.tp_size: Input should be greater than 0"),
        ({"virtual_pp_size": 2}, "virtual_pp_size has no effect without pp_size; set pp_size"),
    ],
    ids=str,
)
def test_unknown_keys_and_invalid_values_are_rejected(config, axes, message):
    with pytest.raises(UserError) as caught:
        config(**axes)
    assert message in str(caught.value)


def test_tp_of_experts_needs_ep(config):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12}
    assert error_message(config(Qwen3MoeConfig(**SHAPE, **heads, **experts), tp_size=2)) == (
        "actor_train: tp_size is 2, and tensor parallelism does not split the experts of the architecture qwen3_moe; "
        "set ep_size too, such as to 2, or remove tp_size"
    )
