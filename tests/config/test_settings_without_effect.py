"""A setting that a run would ignore is rejected; the table below covers every key of the config.

`NEEDS` has the keys that depend on others: a value, the rest of the config without which it has no effect, and the one
with which it has. Keys that only the losses or the model can judge are rejected or reported by `builders/`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.config.test_config_keys import nested, refusal
from tests.support.compared_runs import merge
from thresher.builders.engines import check_engine
from thresher.builders.preflight.files import check_unused_settings
from thresher.config import DPOConfig, parse_config
from thresher.config.dpo import COLUMN_KEYS
from thresher.config.section import known_keys
from thresher.errors import UserError
from thresher.runtime.launch import Launch, fit_to_launch


class Needs(NamedTuple):
    """A value that has no effect with the settings `without`, for this reason, and has one with `having`."""

    value: Any
    reason: str
    without: dict[str, Any] = {}
    having: dict[str, Any] = {}


ON_RAY = {"runtime": "ray"}
ONE_PROCESS = "has no effect in one process; set runtime: ray or remove it"
STORE = {"store": "pairs"}
ON_STORES = {"actor_train": {"data_args": STORE}, "validation": {"data_args": STORE}}
ON_FILES = {"actor_train": {"data_args": {"file_name": "a.jsonl"}}, "validation": {"data_args": STORE}}
NO_FILES = "has no effect on a store, which is already prepared; remove it"
VALIDATION = {"validation": {"data_args": {"file_name": "b.jsonl"}}}
TO_EVALUATE = "has no effect without validation.data_args or validation.split; set one or remove it"
LORA = {"actor_train": {"model_args": {"lora_rank": 4}}}
IN_8_BITS = {"actor_train": {"model_args": {"quantization": {"bits": 8}}}}
MODELS = {
    "actor_train": {"model_args": {"model_name_or_path": "a"}},
    "reference": {"model_args": {"model_name_or_path": "b"}},
}
SHARDED = {"actor_train": {"num_workers": 2}}
JUDGED = {**VALIDATION, "samples": {"judge_url": "http://a/v1", "judge_model": "m"}}


NEEDS = {
    "max_restarts": Needs(2, f"max_restarts {ONE_PROCESS}", having=ON_RAY),
    "heartbeat_timeout": Needs(
        16,
        "heartbeat_timeout has no effect in one process; set runtime: ray or runtime: torchrun, or remove it",
        without={"runtime": "local"},
        having={"runtime": "auto"},  # which a launcher may turn into torchrun
    ),
    "elastic": Needs(True, f"elastic {ONE_PROCESS}", having=SHARDED),
    "ray_address": Needs(
        "a:1", "ray_address has no effect with runtime: local; use runtime: ray", without={"runtime": "local"}
    ),
    **{key: Needs("c", f"{key} {NO_FILES}", without=ON_STORES, having=ON_FILES) for key in COLUMN_KEYS},
    "pretrain": Needs("c", "pretrain has no effect if actor_train and reference name their models", without=MODELS),
    "eval_strategy": Needs("epoch", f"eval_strategy {TO_EVALUATE}", having=VALIDATION),
    "eval_steps": Needs(2, f"eval_steps {TO_EVALUATE}", having=VALIDATION),
    "save_steps": Needs(
        2,
        "save_steps has no effect with save_strategy: epoch; remove it or set save_strategy: steps",
        without={"save_strategy": "epoch"},
        having={"save_strategy": "steps"},
    ),
    "eval_on_start": Needs(True, f"eval_on_start {TO_EVALUATE}", having=VALIDATION),
    "metric_for_best_model": Needs("eval/sft_loss", f"metric_for_best_model {TO_EVALUATE}", having=VALIDATION),
    "greater_is_better": Needs(True, f"greater_is_better {TO_EVALUATE}", having=VALIDATION),
    "actor_train.training_args.per_device_eval_batch_size": Needs(
        2, f"actor_train.training_args.per_device_eval_batch_size {TO_EVALUATE}", having=VALIDATION
    ),
    "tracker_kwargs.wandb_project": Needs(
        "p",
        "tracker_kwargs.wandb_project has no effect without wandb in track_with; add wandb there or remove it",
        having={"track_with": "wandb"},
    ),
    "tracker_kwargs.wandb_entity": Needs("e", "without wandb in track_with", having={"track_with": ["wandb"]}),
    "tracker_kwargs.wandb_mode": Needs("offline", "without wandb in track_with", having={"track_with": ["wandb"]}),
    "tracker_kwargs.mlflow_tracking_uri": Needs(
        "u",
        "tracker_kwargs.mlflow_tracking_uri has no effect without mlflow in track_with",
        without={"track_with": ["wandb"]},
        having={"track_with": ["mlflow"]},
    ),
    "tracker_kwargs.wandb_api_key": Needs("k", "without wandb in track_with", having={"track_with": ["wandb"]}),
    "tracker_kwargs.tensorboard_dir": Needs(
        "d", "without tensorboard in track_with", having={"track_with": ["tensorboard"]}
    ),
    "tracker_kwargs.trackio_project": Needs("p", "without trackio in track_with", having={"track_with": ["trackio"]}),
    "tracker_kwargs.name": Needs(
        "n", "without wandb or mlflow or trackio in track_with", having={"track_with": ["console", "trackio"]}
    ),
    **{
        f"tracker_kwargs.{key}": Needs(
            value, "without wandb or mlflow in track_with", having={"track_with": ["console", "mlflow"]}
        )
        for key, value in (("notes", "t"), ("tags", ["a"]))
    },
    **{
        f"samples.{key}": Needs(value, f"{key} has no effect without judge_url; set judge_url", VALIDATION, JUDGED)
        for key, value in (
            *(("judge_model", "m"), ("judge_key_variable", "K"), ("judge_instructions", "i"), ("judge_max_tokens", 9)),
            *(("judge_timeout", 9.0), ("judge_attempts", 9), ("judge_concurrency", 9)),
        )
    },
    "f_alpha_divergence_coef": Needs(
        0.2,
        "f_alpha_divergence_coef has no effect without f_divergence_type=alpha_divergence",
        having={"f_divergence_type": "alpha_divergence"},
    ),
    "reference.sync_alpha": Needs(
        0.3, "sync_alpha has no effect without sync_steps", having={"reference": {"sync_steps": 2}}
    ),
    "actor_train.training_args.gradient_accumulation_steps": Needs(
        2,
        "gradient_accumulation_steps has no effect with global_batch_size",
        without={"actor_train": {"training_args": {"global_batch_size": 8}}},
    ),
    **{
        f"actor_train.training_args.{key}": Needs(
            value,
            f"actor_train: training_args.{key} has no effect without model_args.dtype fp16; remove it",
            having={"actor_train": {"model_args": {"dtype": "fp16"}}},
        )
        for key, value in (("initial_scale_power", 8), ("loss_scale_window", 100))
    },
    "actor_train.training_args.min_lr_ratio": Needs(
        0.3,
        "min_lr_ratio has no effect without lr_scheduler_type=cosine_with_min_lr",
        having={"actor_train": {"training_args": {"lr_scheduler_type": "cosine_with_min_lr"}}},
    ),
    "actor_train.training_args.activation_offload": Needs(
        True,
        "activation_offload has no effect without gradient_checkpointing; set it to full",
        having={"actor_train": {"training_args": {"gradient_checkpointing": "full"}}},
    ),
    "actor_train.training_args.optim_args": Needs(
        {"momentum": 0.9},
        "optim_args has no effect with optim adamw",
        having={"actor_train": {"training_args": {"optim": "sgd"}}},
    ),
    "actor_train.training_args.lr_power": Needs(
        2.0,
        "lr_power has no effect without lr_scheduler_type=polynomial",
        having={"actor_train": {"training_args": {"lr_scheduler_type": "polynomial"}}},
    ),
    **{
        f"actor_train.model_args.{key}": Needs(value, f"{key} has no effect without lora_rank", having=LORA)
        for key, value in (
            ("lora_alpha", 4.0),
            ("lora_dropout", 0.1),
            ("lora_target", ["q_proj"]),
            ("lora_init", "pissa"),
            ("lora_plus_ratio", 16.0),
            ("use_rslora", True),
            ("use_dora", True),
            ("lora_rank_pattern", {"q_proj": 2}),
            ("lora_alpha_pattern", {"q_proj": 2.0}),
            ("modules_to_save", ["lm_head"]),
            ("lora_exclude", ["q_proj"]),
        )
    },
    **{
        f"actor_train.model_args.quantization.{key}": Needs(
            value, f"{key} has no effect with bits 8; remove it", without=merge(LORA, IN_8_BITS), having=LORA
        )
        for key, value in (("type", "fp4"), ("double", False))
    },
    "actor_train.model_args.freeze_module_prefix": Needs(
        "lm_head", "freeze_module_prefix has no effect with lora_rank", without=LORA
    ),
    **{
        f"{section}.data_args.{key}": Needs(value, f"{key} {NO_FILES}", without={section: {"data_args": STORE}})
        for section in ("actor_train", "validation")
        for key, value in (
            ("dataset_dir", "d"),
            ("template", "raw"),
            ("template_arguments", {"enable_thinking": False}),
            ("truncation", "prompt_start"),
            ("on_bad_row", "skip"),
            ("special_tokens_in_text", "reject"),
            ("system_prompt", "Be brief."),
            ("max_samples", 5),
            ("join_labelled", True),
            ("margin_from_scores", True),
            ("preprocessing_num_workers", 2),
        )
    },
    **{
        f"{section}.data_args.revision": Needs(
            "v1",
            "revision has no effect without a dataset of the Hub, hf://OWNER/NAME, in file_name",
            without={section: {"data_args": {"file_name": ["a.jsonl"]}}},
            having={section: {"data_args": {"file_name": ["a.jsonl", "hf://org/pairs"]}}},
        )
        for section in ("actor_train", "validation")
    },
    "validation.split": Needs(
        0.1,
        "validation: data_args.file_name has no effect with split, which holds out training pairs; keep one",
        without=VALIDATION,
        having={"actor_train": {"data_args": STORE}},
    ),
    **{
        f"{section}.data_args.file_name": Needs(
            "a.jsonl", "file_name and store are both set", without={section: {"data_args": STORE}}
        )
        for section in ("actor_train", "validation")
    },
    **{
        f"{role}.num_workers": Needs(
            2, "num_workers has no effect with device_mapping", without={role: {"device_mapping": [0, 1]}}
        )
        for role in ("actor_train", "reference")
    },
}
# keys that always have an effect, or whose effect depends on more than the config: on the losses (rejected by
# `build_objective`), on the model, or on the mode of the reference (reported by `unused_settings`)
ALWAYS = {
    "num_gpus_per_node",  # a warning of `thresher check`
    "export_model",
    "profile.steps",
    *("exp_name", "seed", "output_dir", "logging_dir", "max_steps", "num_train_epochs", "save_strategy", "async_save"),
    *("logging_steps", "resume_from_checkpoint", "save_total_limit", "max_consecutive_skipped_steps"),
    *(
        "graceful_stop_timeout",
        "health",
        "runtime",
        "layout",
        "apply_loss_mask",
        "sequence_length",
        "track_with",
        "system_envs",
        "cache_dir",
    ),
    *("actor_train.system_envs", "reference.system_envs"),
    # without prompts, the whole section is rejected: tests/sampling/test_settings.py
    *(f"samples.{name}" for name in ("num_prompts", "prompts_file", "max_new_tokens", "temperature")),
    *("samples.judge", "samples.judge_url"),
    "actor_train.model_args.quantization.bits",  # without an adapter too: tests/training/test_quantization.py
    *(f"actor_train.training_args.{name}" for name in ("warmup_steps", "warmup_ratio")),
    *(f"actor_train.training_args.{name}" for name in ("learning_rate", "per_device_train_batch_size", "weight_decay")),
    *(f"actor_train.training_args.{name}" for name in ("global_batch_size", "max_tokens_per_micro_batch")),
    *(f"actor_train.training_args.{name}" for name in ("log_num_zeros_in_grad", "optim", "param_groups")),
    *(f"actor_train.training_args.{name}" for name in ("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")),
    *(f"actor_train.training_args.{name}" for name in ("lr_scheduler_type", "gradient_checkpointing", "torch_compile")),
    *(f"{section}.data_args.store" for section in ("actor_train", "validation")),
    *("actor_train.data_args.sources", "actor_train.data_args.order", "validation.sets"),
}
BY_LOSS = {
    *(
        "pref_loss",
        "pref_loss_digests",
        "ipo",
        "simpo_loss",
        "beta",
        "label_smoothing",
        "gamma",
        "length_normalization",
        "cpo_alpha",
    ),
    *("alphapo_alpha", "dpop_lambda", "clamp_log_ratio", "comparisons"),
    *("desirable_weight", "undesirable_weight", "infonca_alpha", "reward_scale", "center_rewards_coefficient"),
    *("discopop_tau", "rpo_alpha", "f_divergence_type", "ld_alpha", "use_wpo", "length_penalty"),
}
BY_MODEL_OR_MODE = {
    *(f"actor_train.model_args.{name}" for name in ("model_name_or_path", "model_type", "dtype", "master_dtype")),
    *(f"actor_train.model_args.{name}" for name in ("attn_implementation", "pad_token", "trust_remote_code")),
    *(f"actor_train.model_args.{name}" for name in ("tokenizer_name_or_path", "moe_aux_loss_coef", "revision")),
    "actor_train.model_args.adapter_name_or_path",
    "actor_train.model_args.merge_adapters",
    "reference.model_args.revision",
    "actor_train.model_args.lora_rank",
    *(f"reference.model_args.{name}" for name in ("model_name_or_path", "model_type", "dtype", "master_dtype")),
    *(f"reference.model_args.{name}" for name in ("attn_implementation", "trust_remote_code")),
    *(f"reference.{name}" for name in ("mode", "infer_batch_size", "cache_dir", "prefetch_steps", "sync_steps")),
    *(f"{role}.strategy_args.strategy_{name}" for role in ("actor_train", "reference") for name in ("name", "config")),
    *(f"{role}.device_mapping" for role in ("actor_train", "reference")),
}


def test_every_key_is_in_the_table():
    keys = {key for key, _ in known_keys(DPOConfig)}
    sections = {key.rpartition(".")[0] for key in keys} | {"actor_train.strategy_args", "reference.strategy_args"}
    tables = (set(NEEDS), ALWAYS, BY_LOSS, BY_MODEL_OR_MODE)
    assert sum(map(len, tables)) == len(set().union(*tables)), "a key is in two tables"
    assert set().union(*tables) == keys - sections


@pytest.mark.parametrize("key", NEEDS)
def test_a_setting_that_a_run_would_ignore_is_rejected(key):
    case = NEEDS[key]
    assert case.reason in refusal(merge(case.without, nested(key, case.value)))
    if case.having:
        parse_config(merge(case.having, nested(key, case.value)))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("ray_address", "a:1", "ray_address has no effect with runtime: torchrun; use runtime: ray"),
        ("max_restarts", 2, "max_restarts has no effect with runtime: torchrun; set runtime: ray or remove it"),
        ("elastic", True, "elastic has no effect with runtime: torchrun"),
        *(
            (f"reference.{name}", value, f"reference.{name} has no effect with runtime: torchrun, where the policy's")
            for name, value in (
                ("num_workers", 2),
                ("device_mapping", [0]),
                ("strategy_args", {"strategy_name": "hf_infer"}),
            )
        ),
    ],
)
def test_settings_of_ray_and_of_reference_workers_are_rejected_with_torchrun(key, value, reason):
    assert reason in refusal(merge({"runtime": "torchrun"}, nested(key, value)))


def test_a_timeout_of_workers_is_rejected_in_one_process_and_accepted_under_a_launcher():
    config = parse_config({"heartbeat_timeout": 16})
    launched = fit_to_launch(config, Launch("torchrun", 0, 2, 0, ("127.0.0.1", 1)))
    assert list(check_unused_settings(launched)) == []
    (finding,) = check_unused_settings(fit_to_launch(config, None))
    assert "heartbeat_timeout has no effect in one process" in str(finding)


@pytest.mark.parametrize("key", NEEDS)
def test_a_default_that_is_written_out_is_accepted(key):
    default = dict(known_keys(DPOConfig))[key].get_default()
    parse_config(merge(NEEDS[key].without, nested(key, default)))


def test_steps_between_evaluations_have_no_effect_with_another_strategy():
    for strategy in ("epoch", "no"):
        values = {**VALIDATION, "eval_strategy": strategy, "eval_steps": 5}
        assert f"eval_steps has no effect with eval_strategy: {strategy}; remove it or set" in refusal(values)


def test_all_settings_without_effect_are_reported_at_once():
    values = {"elastic": True, "max_restarts": 1, "eval_steps": 5, "tracker_kwargs": {"wandb_project": "p"}}
    assert refusal(values).splitlines() == [
        "invalid configuration:",
        "  - max_restarts, elastic have no effect in one process; set runtime: ray or remove them",
        "  - eval_steps has no effect without validation.data_args or validation.split; set one or remove it",
        "  - tracker_kwargs.wandb_project has no effect without wandb in track_with; add wandb there or remove it",
    ]


@pytest.mark.parametrize(
    "role",
    [
        {},
        {"num_workers": 2, "strategy_args": {"strategy_config": {"dp_replicate": 2}}},
        {"num_workers": 2, "strategy_args": {"strategy_config": {"tp_size": 2}}},
    ],
    ids=["one process", "replicas", "tensor parallel only"],
)
@pytest.mark.parametrize(("key", "value"), [("cpu_offload", True), ("zero_stage", 2), ("reduce_dtype", "bf16")])
def test_settings_of_shards_need_workers_that_shard_the_model(role, key, value):
    if key == "reduce_dtype":  # which replicas refuse for another reason
        role = {**role, "num_workers": 1, "strategy_args": {}}
    config = parse_config({"actor_train": merge(role, {"strategy_args": {"strategy_config": {key: value}}})})
    with pytest.raises(UserError) as caught:
        check_engine(config, "actor_train")
    assert str(caught.value) == (
        f"actor_train.strategy_args.strategy_config.{key} has no effect: no two workers shard the model; use more "
        "workers or remove it"
    )


@pytest.mark.parametrize(
    ("key", "value", "default"), [("cpu_offload", True, False), ("zero_stage", 2, 3), ("reduce_dtype", "bf16", "fp32")]
)
def test_settings_of_shards_are_accepted_where_workers_shard_the_model(key, value, default):
    strategy = {"strategy_config": {key: value}}
    check_engine(parse_config({"actor_train": {"num_workers": 2, "strategy_args": strategy}}), "actor_train")
    written_out = {"strategy_config": {key: default}}
    check_engine(parse_config({"actor_train": {"strategy_args": written_out}}), "actor_train")


@pytest.mark.parametrize("stage", [0, 4, True, "two"])
def test_a_stage_that_fsdp2_does_not_have_is_rejected(stage):
    values = {"actor_train": {"num_workers": 2, "strategy_args": {"strategy_config": {"zero_stage": stage}}}}
    assert "strategy_config.zero_stage: Input should be 1, 2 or 3" in refusal(values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sequence_parallel": True}, "sequence_parallel has no effect without tp_size; set tp_size"),
        ({"zero_stage": 1, "pp_size": 2, "virtual_pp_size": 2}, "zero_stage 1 does not support virtual_pp_size"),
        ({"reduce_dtype": "bf16", "zero_stage": 1}, "reduce_dtype bf16 with zero_stage 1 would add up micro-batches"),
        ({"reduce_dtype": "bf16", "dp_replicate": 2}, "reduce_dtype bf16 with dp_replicate would add up micro-batches"),
        ({"pp_schedule": "zero_bubble"}, "pp_schedule has no effect without pp_size; set pp_size"),
        ({"pp_dtype": "bf16"}, "pp_dtype has no effect without pp_size; set pp_size"),
    ],
    ids=str,
)
def test_settings_of_fsdp2_that_exclude_each_other_are_rejected(settings, message):
    assert message in refusal({"actor_train": {"num_workers": 4, "strategy_args": {"strategy_config": settings}}})
