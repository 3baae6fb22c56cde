"""Axes that cannot be are refused before any worker starts, with the sizes that can."""

from __future__ import annotations

import pytest
from transformers import GPTNeoXConfig, LlamaConfig, OPTConfig

from thresher.builders.axes import axis_sizes
from thresher.builders.engines import check_engines
from thresher.config import parse_config
from thresher.distributed.mesh import ParallelDims
from thresher.errors import UserError

SHAPE = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 4}


@pytest.fixture
def config(tmp_path):
    def make(family=None, *, num_workers=4, role="actor_train", layout="auto", strategy=None, **axes):
        family = family or LlamaConfig(**SHAPE, num_attention_heads=12, num_key_value_heads=6)
        family.save_pretrained(tmp_path / "model")
        args = {"strategy_config": axes} | ({} if strategy is None else {"strategy_name": strategy})
        return parse_config(
            {
                "pretrain": str(tmp_path / "model"),
                "layout": layout,
                role: {"num_workers": num_workers, "strategy_args": args},
            }
        )

    return make


def refusal(config) -> str:
    with pytest.raises(UserError) as caught:
        check_engines(config)
    return str(caught.value)


def test_what_the_named_axes_leave_of_the_workers_shards(config):
    assert axis_sizes(config(num_workers=8, tp_size=2).actor_train) == ParallelDims(dp_shard=4, tp=2)
    assert axis_sizes(config(num_workers=8, dp_replicate=2).actor_train) == ParallelDims(dp_replicate=2, dp_shard=4)
    assert axis_sizes(config(num_workers=8, dp_replicate=8).actor_train).is_replicated
    assert axis_sizes(config(num_workers=8, role="reference").reference) == ParallelDims(dp_replicate=8)
    split = config(num_workers=8, role="reference", strategy="fsdp2_infer", tp_size=2).reference
    assert axis_sizes(split) == ParallelDims(dp_shard=4, tp=2)


def test_a_step_has_a_share_for_every_data_rank_not_for_every_worker(config):
    assert config(num_workers=8).pairs_per_step == 8 * 8
    assert config(num_workers=8, tp_size=2, cp_size=2).pairs_per_step == 2 * 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_workers": 6, "tp_size": 4},
            "actor_train has 6 workers, and tp_size 4 = 4 does not divide that; use 4 or 8 workers (device_mapping, or "
            "num_workers on CPUs), or smaller axes",
        ),
        (
            {"num_workers": 1, "tp_size": 2, "pp_size": 2},
            "actor_train has 1 worker, and pp_size 2 x tp_size 2 = 4 does not divide that; use 4 workers "
            "(device_mapping, or num_workers on CPUs), or smaller axes",
        ),
        (
            {"tp_size": 4},
            "actor_train: tp_size is 4, and the model has 12 heads with 6 of keys and values; tp_size can be 1, 2, 3, "
            "6",
        ),
        (
            {"num_workers": 8, "tp_size": 2, "cp_size": 4},
            "actor_train: cp_size is 4, and the model has 6 heads with 3 of keys and values a worker; cp_size can be "
            "1, 3, 6",
        ),
        (
            {"cp_size": 2, "layout": "padded"},
            "actor_train: cp_size is 2, which splits packed rows, and the layout is padded; leave cp_size out, or use "
            "layout=shared or layout=packed where the model allows it",
        ),
        (
            {"num_workers": 8, "pp_size": 8},
            "actor_train: pp_size 8 with virtual_pp_size 1 makes 8 stages, and the model has 4 layers; use at most 4",
        ),
        (
            {"pp_size": 2, "virtual_pp_size": 3},
            "actor_train: pp_size 2 with virtual_pp_size 3 makes 6 stages, and the model has 4 layers; use at most 4",
        ),
        (
            {"role": "reference", "tp_size": 2},
            "reference.strategy_args.strategy_config has no effect with hf_infer, which keeps whole copies; remove it, "
            "or set strategy_name to fsdp2_infer",
        ),
    ],
    ids=lambda value: " ".join(f"{name}={size}" for name, size in value.items()) if isinstance(value, dict) else "",
)
def test_sizes_that_cannot_work(config, settings, message):
    assert refusal(config(**settings)) == message


def test_a_family_without_a_plan_is_told(config):
    family = OPTConfig(vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4)
    assert refusal(config(family, num_workers=2, tp_size=2)) == (
        "actor_train: tp_size is 2, and transformers has no tensor-parallel plan for the model family opt; leave "
        "tp_size out"
    )


def test_a_family_with_a_plan_is_taken(config):
    family = GPTNeoXConfig(**SHAPE, num_attention_heads=4)
    check_engines(config(family, num_workers=2, tp_size=2))


def test_a_model_in_one_file_cannot_be_split_and_can_be_copied(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    asked = {"pretrain": str(path), "actor_train": {"num_workers": 2}}
    assert refusal(parse_config(asked)) == (
        f"actor_train splits its model over 2 workers, which is read from a directory with safetensors, and {path} is "
        "none; convert it, or set actor_train.strategy_args.strategy_config.dp_replicate=2 for a whole copy in every "
        "worker"
    )
    asked["actor_train"]["strategy_args"] = {"strategy_config": {"dp_replicate": 2}}
    check_engines(parse_config(asked))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor_parallel_size": 2}, "strategy_config has no key tensor_parallel_size; known: tp_size, pp_size"),
        ({"tp_size": 0}, "strategy_config.tp_size: Input should be greater than 0"),
        ({"virtual_pp_size": 2}, "virtual_pp_size has no effect without pp_size; set pp_size"),
    ],
    ids=str,
)
def test_settings_that_are_no_axes(config, axes, message):
    with pytest.raises(UserError) as caught:
        config(**axes)
    assert message in str(caught.value)
