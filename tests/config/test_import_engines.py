"""Engines and their settings in configs of other trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.imported import entry, imported, lost, value
from thresher.errors import UserError

STRATEGY = "actor_train.strategy_args."
ENGINE = f"{STRATEGY}strategy_config"


def colossalchat(tmp_path: Path, options: str, processes: int = 4) -> dict:
    """The strategy_config of an imported script."""
    command = f"colossalai run --nproc_per_node {processes} train_dpo.py --pretrain m --dataset d --lr 1e-6 {options}\n"
    done = imported(tmp_path, command, "train.sh")
    assert not lost(done)
    return done.translation.values["actor_train"].get("strategy_args", {}).get("strategy_config", {})


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("--plugin ddp", {"dp_replicate": 4}),
        ("--plugin zero2", {"zero_stage": 2}),
        ("--plugin zero2_cpu", {"zero_stage": 2, "cpu_offload": True}),
        ("--plugin gemini", {"zero_stage": 3}),
        ("--plugin gemini_auto", {"zero_stage": 3}),
        ("--plugin 3d --tp 2", {"tp_size": 2, "dp_replicate": 2}),
        ("--plugin 3d --tp 4", {"tp_size": 4}),
        ("--plugin 3d --tp 2 --zero_stage 1", {"tp_size": 2, "zero_stage": 1}),
        ("--plugin 3d --pp 2 --zero_stage 1 --zero_cpu_offload", {"pp_size": 2, "zero_stage": 1, "cpu_offload": True}),
        ("--plugin 3d --zero_stage 2", {"zero_stage": 2}),
        ("--plugin 3d --tp 2 --pp 2 --zero_stage 1 --zero_cpu_offload", {"tp_size": 2, "pp_size": 2}),
        ("--plugin 3d --sp 2 --sp_mode all_to_all", {"cp_size": 2, "dp_replicate": 2}),
        ("--plugin 3d --sp 4 --sp_mode ring_attn", {"cp_size": 4}),
        ("--plugin 3d --tp 2 --sp 2 --sp_mode split_gather --zero_stage 2", {"tp_size": 2, "zero_stage": 2}),
        ("--plugin 3d --zero_cpu_offload", {"dp_replicate": 4}),
    ],
)
def test_a_plugin_of_colossalchat_becomes_settings_of_fsdp2(tmp_path, options, settings):
    assert colossalchat(tmp_path, options) == settings


@pytest.mark.parametrize("plugin", ["ddp", "zero2", "zero2_cpu", "gemini", "gemini_auto", "3d"])
def test_a_plugin_has_no_setting_for_one_worker(tmp_path, plugin):
    assert colossalchat(tmp_path, f"--plugin {plugin}", processes=1) == {}


@pytest.mark.parametrize(
    ("options", "name"),
    [("gemini", "fsdp2_infer"), ("zero2", None), ("gemini --loss_type simpo_loss", None)],
)
def test_gemini_shards_the_reference_too(tmp_path, options, name):
    command = f"colossalai run --nproc_per_node 2 train_dpo.py --pretrain m --dataset d --plugin {options}\n"
    done = imported(tmp_path, command, "train.sh")
    assert value(done, "reference.strategy_args.strategy_name") == name


def test_an_unknown_plugin_is_reported(tmp_path):
    done = imported(tmp_path, "colossalai run train_dpo.py --pretrain m --dataset d --plugin moe\n", "train.sh")
    assert lost(done) == {"plugin"}
    assert entry(done, "plugin").notes == ["the plugins are ddp, zero2, zero2_cpu, gemini, gemini_auto, 3d"]


@pytest.mark.parametrize(
    ("deepspeed", "settings"),
    [
        ("zero1", {"zero_stage": 1}),
        ("examples/deepspeed/ds_z2_config.json", {"zero_stage": 2}),
        ("examples/deepspeed/ds_z2_offload_config.json", {"zero_stage": 2, "offload_optimizer": True}),
        ("ds_z3_offload_config.json", {"zero_stage": 3, "offload_optimizer": True, "offload_param": True}),
        ("deepspeed_configs/zero3_bf16.json", {"zero_stage": 3}),
        ("deepspeed_configs/zero3_bf16_cpuoffload_params.json", {"zero_stage": 3, "offload_param": True}),
        ("{zero_optimization: {stage: 1, overlap_comm: true}, bf16: {enabled: auto}}", {"zero_stage": 1}),
        ("{zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}",
         {"zero_stage": 2, "offload_optimizer": True}),
        ("{gradient_clipping: auto}", {"zero_stage": 0}),
    ],
)  # fmt: skip
def test_the_stage_and_the_offloading_of_deepspeed_are_kept(tmp_path, deepspeed, settings):
    done = imported(tmp_path, f"model_name_or_path: m\ndataset_name: d\ndeepspeed: {deepspeed}\n")
    assert done.translation.values["actor_train"]["strategy_args"] == {
        "strategy_name": "deepspeed_train",
        "strategy_config": settings,
    }
    assert not lost(done)


def test_a_deepspeed_file_is_read_where_it_exists(tmp_path, monkeypatch):
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}')
    monkeypatch.chdir(tmp_path)
    done = imported(tmp_path, "model_name_or_path: m\ndataset_name: d\ndeepspeed: zero3.json\n")
    assert value(done, f"{ENGINE}.zero_stage") == 1, "its content counts, not its name"
    assert value(done, f"{ENGINE}.offload_optimizer") is True


@pytest.mark.parametrize("deepspeed", ["my_cluster.json", "{zero_optimization: {stage: 7}}", "llama-7b-z.json"])
def test_a_deepspeed_file_without_a_known_stage_is_left_out(tmp_path, deepspeed):
    done = imported(tmp_path, f"model_name_or_path: m\ndataset_name: d\ndeepspeed: {deepspeed}\n")
    assert value(done, f"{STRATEGY}strategy_name") is None
    assert "set strategy_name to deepspeed_train" in entry(done, "deepspeed").notes[0]
    assert not lost(done)


@pytest.mark.parametrize(("stage", "name"), [(2, None), (3, "deepspeed_infer")])
def test_zero_3_shards_the_reference_too(tmp_path, stage, name):
    command = "NPROC_PER_NODE=2 swift rlhf --rlhf_type dpo --model m --dataset a.jsonl --tuner_type full --deepspeed"
    done = imported(tmp_path, f"{command} zero{stage}\n", "train.sh")
    assert value(done, "reference.strategy_args.strategy_name") == name


def test_the_stage_of_open_instruct_is_kept(tmp_path):
    text = "model_name_or_path: m\ndataset_name: org/a\nmax_seq_length: 64\nzero_stage: 3\noffload_param: true\n"
    done = imported(tmp_path, text)
    assert value(done, f"{STRATEGY}strategy_name") == "deepspeed_train"
    assert (value(done, f"{ENGINE}.zero_stage"), value(done, f"{ENGINE}.offload_param")) == (3, True)
    assert not lost(done)


ROLL = """
exp_name: mine
pretrain: m
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  strategy_args: {{strategy_name: {name}, strategy_config: {settings}}}
  device_mapping: list(range(0,4))
"""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("megatron_train", "{tensor_model_parallel_size: 2, sequence_parallel: true, recompute_granularity: full}"),
        ("megatron_train", "{expert_model_parallel_size: 2, moe_grouped_gemm: true, bf16: true}"),
        ("deepspeed_train", "{zero_optimization: {stage: 3, overlap_comm: true}, bf16: {enabled: auto}}"),
    ],
)
def test_the_engines_of_roll_keep_their_names_and_settings(tmp_path, name, settings):
    done = imported(tmp_path, ROLL.format(name=name, settings=settings))
    assert value(done, f"{STRATEGY}strategy_name") == name
    kept = entry(done, ENGINE)
    assert kept.outcome == "kept"
    assert value(done, ENGINE) == kept.value
    assert not lost(done)


def test_a_setting_that_an_engine_lacks_is_reported_and_left_out(tmp_path):
    settings = "{tensor_model_parallel_size: 2, moe_layer_recompute: true, context_parallel_size: null}"
    done = imported(tmp_path, ROLL.format(name="megatron_train", settings=settings))
    assert value(done, ENGINE) == {"tensor_model_parallel_size": 2}
    assert entry(done, ENGINE).notes == [
        "settings without an equivalent, which do not change the numbers: moe_layer_recompute"
    ]
    done = imported(tmp_path, ROLL.format(name="megatron_train", settings="{moe_z_loss_coeff: 0.1}"))
    assert lost(done) == {ENGINE}
    assert entry(done, ENGINE).notes == ["megatron_train has no setting moe_z_loss_coeff"]


def test_a_value_that_an_engine_rejects_is_an_error(tmp_path):
    settings = "{virtual_pipeline_model_parallel_size: 2}"
    with pytest.raises(UserError, match="virtual_pipeline_model_parallel_size has no effect without pipeline_model"):
        imported(tmp_path, ROLL.format(name="megatron_train", settings=settings))


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        ("{reshard_after_forward: false, offload_policy: true}", {"zero_stage": 2, "cpu_offload": True}),
        ("{fsdp_size: 4, reshard_after_forward: true, param_dtype: bfloat16, offload_policy: false}", None),
    ],
)
def test_fsdp2_of_roll(tmp_path, settings, ours):
    done = imported(tmp_path, ROLL.format(name="fsdp2_train", settings=settings))
    strategy = done.translation.values["actor_train"]["strategy_args"]
    assert (strategy["strategy_name"], strategy.get("strategy_config")) == ("fsdp2_train", ours)
    assert not lost(done)


SWIFT = "NPROC_PER_NODE={} megatron rlhf --rlhf_type dpo --model m --dataset a.jsonl {}\n"


def test_megatron_of_ms_swift_keeps_its_settings_for_policy_and_reference(tmp_path):
    options = (
        "--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --sequence_parallel true "
        "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --context_parallel_size 1"
    )
    done = imported(tmp_path, SWIFT.format(4, options), "train.sh")
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    values = done.translation.values
    assert values["actor_train"]["strategy_args"] == {
        "strategy_name": "megatron_train",
        "strategy_config": sizes | recomputed,
    }
    assert values["reference"]["strategy_args"] == {"strategy_name": "megatron_infer", "strategy_config": sizes}
    assert not lost(done)


def test_megatron_of_ms_swift_on_one_device_and_with_lora(tmp_path):
    one = imported(tmp_path, SWIFT.format(1, "--tensor_model_parallel_size 4"), "train.sh")
    assert value(one, f"{STRATEGY}strategy_name") == "megatron_train"
    assert value(one, f"{ENGINE}.tensor_model_parallel_size") is None
    lora = imported(tmp_path, SWIFT.format(2, "--tensor_model_parallel_size 2 --tuner_type lora"), "train.sh")
    assert value(lora, f"{ENGINE}.tensor_model_parallel_size") == 2
    assert value(lora, "reference.strategy_args.strategy_name") is None, "the policy without its adapter"


def test_megatron_of_nemo_rl(tmp_path):
    done = imported(
        tmp_path,
        """
policy:
  model_name: m
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 1
    sequence_parallel: true
    optimizer: {lr: 1e-6}
dpo: {max_num_steps: 5}
cluster: {gpus_per_node: 4, num_nodes: 1}
""",
    )
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    values = done.translation.values
    assert values["actor_train"]["strategy_args"] == {"strategy_name": "megatron_train", "strategy_config": sizes}
    assert values["reference"]["strategy_args"] == {"strategy_name": "megatron_infer", "strategy_config": sizes}


def test_a_key_beside_the_settings_of_an_engine_joins_them(tmp_path):
    text = ROLL.format(name="megatron_train", settings="{tensor_model_parallel_size: 2}")
    done = imported(tmp_path, text.replace("model_args: {", "model_args: {ulysses_size: 2, "))
    assert done.translation.values["actor_train"]["strategy_args"]["strategy_config"] == {
        "tensor_model_parallel_size": 2,
        "cp_size": 2,
    }
