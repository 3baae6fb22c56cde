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
from thresher.config import DPOConfig, parse_config
from thresher.config.section import known_keys
from thresher.errors import UserError


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
TO_EVALUATE = "has no effect without validation.data_args; set that or remove it"
LORA = {"actor_train": {"model_args": {"lora_rank": 4}}}
MODELS = {
    "actor_train": {"model_args": {"model_name_or_path": "a"}},
    "reference": {"model_args": {"model_name_or_path": "b"}},
}
SHARDED = {"actor_train": {"num_workers": 2}}


NEEDS = {
    "max_restarts": Needs(2, f"max_restarts {ONE_PROCESS}", having=ON_RAY),
    "heartbeat_timeout": Needs(16, f"heartbeat_timeout {ONE_PROCESS}", having=ON_RAY),
    "elastic": Needs(True, f"elastic {ONE_PROCESS}", having=SHARDED),
    "num_gpus_per_node": Needs(
        8,
        f"num_gpus_per_node {ONE_PROCESS}",
        without={"actor_train": {"device_mapping": [0]}},
        having={"actor_train": {"device_mapping": [0, 1]}},
    ),
    "ray_address": Needs(
        "a:1", "ray_address has no effect with runtime: local; use runtime: ray", without={"runtime": "local"}
    ),
    "chosen_key": Needs("c", f"chosen_key {NO_FILES}", without=ON_STORES, having=ON_FILES),
    "rejected_key": Needs("c", f"rejected_key {NO_FILES}", without=ON_STORES, having=ON_FILES),
    "prompt_key": Needs("c", f"prompt_key {NO_FILES}", without=ON_STORES, having=ON_FILES),
    "pretrain": Needs("c", "pretrain has no effect if actor_train and reference name their models", without=MODELS),
    "eval_steps": Needs(2, f"eval_steps {TO_EVALUATE}", having=VALIDATION),
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
    **{
        f"tracker_kwargs.{key}": Needs(
            value, "without wandb or mlflow in track_with", having={"track_with": ["console", "mlflow"]}
        )
        for key, value in (("name", "n"), ("notes", "t"), ("tags", ["a"]))
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
    "actor_train.training_args.min_lr_ratio": Needs(
        0.3,
        "min_lr_ratio has no effect without lr_scheduler_type=cosine_with_min_lr",
        having={"actor_train": {"training_args": {"lr_scheduler_type": "cosine_with_min_lr"}}},
    ),
    "actor_train.training_args.lr_power": Needs(
        2.0,
        "lr_power has no effect without lr_scheduler_type=polynomial",
        having={"actor_train": {"training_args": {"lr_scheduler_type": "polynomial"}}},
    ),
    **{
        f"actor_train.model_args.{key}": Needs(value, f"{key} has no effect without lora_rank", having=LORA)
        for key, value in (("lora_alpha", 4.0), ("lora_dropout", 0.1), ("lora_target", ["q_proj"]))
    },
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
            ("preprocessing_num_workers", 2),
        )
    },
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
    *("exp_name", "seed", "output_dir", "logging_dir", "max_steps", "num_train_epochs", "save_steps", "async_save"),
    *("logging_steps", "resume_from_checkpoint", "save_total_limit", "max_consecutive_skipped_steps"),
    *("graceful_stop_timeout", "runtime", "layout", "sequence_length", "track_with", "system_envs", "cache_dir"),
    *("actor_train.system_envs", "reference.system_envs"),
    *(f"actor_train.training_args.{name}" for name in ("warmup_steps", "warmup_ratio")),
    *(f"actor_train.training_args.{name}" for name in ("learning_rate", "per_device_train_batch_size", "weight_decay")),
    *(f"actor_train.training_args.{name}" for name in ("global_batch_size", "max_tokens_per_micro_batch")),
    *(f"actor_train.training_args.{name}" for name in ("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")),
    *(f"actor_train.training_args.{name}" for name in ("lr_scheduler_type", "gradient_checkpointing", "torch_compile")),
    *(f"{section}.data_args.store" for section in ("actor_train", "validation")),
}
BY_LOSS = {
    *("pref_loss", "ipo", "simpo_loss", "beta", "label_smoothing", "gamma", "length_normalization", "cpo_alpha"),
    *("discopop_tau", "rpo_alpha", "f_divergence_type", "ld_alpha", "use_wpo", "length_penalty"),
}
BY_MODEL_OR_MODE = {
    *(f"actor_train.model_args.{name}" for name in ("model_name_or_path", "model_type", "dtype", "master_dtype")),
    *(f"actor_train.model_args.{name}" for name in ("attn_implementation", "pad_token", "trust_remote_code")),
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


@pytest.mark.parametrize("key", NEEDS)
def test_a_default_that_is_written_out_is_accepted(key):
    default = dict(known_keys(DPOConfig))[key].get_default()
    parse_config(merge(NEEDS[key].without, nested(key, default)))


def test_all_settings_without_effect_are_reported_at_once():
    values = {"elastic": True, "max_restarts": 1, "eval_steps": 5, "tracker_kwargs": {"wandb_project": "p"}}
    assert refusal(values).splitlines() == [
        "invalid configuration:",
        "  - max_restarts, elastic have no effect in one process; set runtime: ray or remove them",
        "  - eval_steps has no effect without validation.data_args; set that or remove it",
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
def test_offloading_needs_workers_that_shard_the_model(role):
    config = parse_config({"actor_train": merge(role, {"strategy_args": {"strategy_config": {"cpu_offload": True}}})})
    with pytest.raises(UserError) as caught:
        check_engine(config, "actor_train")
    assert str(caught.value) == (
        "actor_train.strategy_args.strategy_config.cpu_offload has no effect: no two workers shard the model; use more "
        "workers or remove it"
    )


def test_offloading_is_accepted_where_workers_shard_the_model():
    strategy = {"strategy_config": {"cpu_offload": True}}
    check_engine(parse_config({"actor_train": {"num_workers": 2, "strategy_args": strategy}}), "actor_train")
    off = {"strategy_config": {"cpu_offload": False}}
    check_engine(parse_config({"actor_train": {"strategy_args": off}}), "actor_train")
