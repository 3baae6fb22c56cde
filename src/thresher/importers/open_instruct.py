"""open-instruct (`dpo_tune_cache.py`, `dpo.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thresher.importers import mixtures
from thresher.importers import rules as r
from thresher.importers.engines import set_deepspeed
from thresher.importers.huggingface import TABLE as HF
from thresher.importers.huggingface import set_max_steps, set_resume, set_schedule
from thresher.importers.translation import (
    DATA,
    ENGINE,
    EVAL_FILES,
    FILES,
    MODEL,
    SETS,
    SOURCES,
    STRATEGY,
    TRAINING,
    Rule,
    Translation,
)

_LOSSES = {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "simpo": "simpo"}


def _is_lora(run: Translation) -> bool:
    return bool(run.get("use_lora") or run.get("use_qlora"))


def _set_loss(value: Any, run: Translation) -> None:
    if value in _LOSSES:
        run.set("pref_loss", _LOSSES[value])
    else:
        run.lacks("use_wpo weighs pairs by a different formula" if value == "wpo" else f"there is no loss {value}")


def _set_gamma(value: Any, run: Translation) -> None:
    if "simpo" in run.losses:
        run.set("gamma", float(value) * float(run.get("beta")))
        run.note("gamma = gamma_beta_ratio * beta")
    else:
        run.ignore("only for simpo")


def _set_smoothing(value: Any, run: Translation) -> None:
    if "sigmoid" in run.losses:
        run.set("label_smoothing", value)
    else:
        run.lacks(f"{run.losses[0]} has no label smoothing")


def _set_zero(value: Any, run: Translation) -> None:
    offloads = [name for name in ("offload_optimizer", "offload_param") if run.get(name)]
    set_deepspeed(run, {"zero_stage": int(value), **dict.fromkeys(offloads, True)})


def _offload(name: str) -> Rule:
    return r.by(lambda _, run: run.use(f"{ENGINE}{name}"), ENGINE.removesuffix("."), note="read with `zero_stage`")


def _set_mixer(target: str) -> r.Function:
    """Make a function that reads names with amounts: a number with a decimal point is a share, without one a count."""

    def function(value: Any, run: Translation) -> None:
        pairs = list(value.items()) if isinstance(value, Mapping) else list(zip(value[::2], value[1::2], strict=True))
        shared = run.get("mixer_list_splits", "train") if target == FILES else "train"  # also of dataset_mixer
        splits = run.get(f"{run.entries[-1].key}_splits", shared)
        splits = splits if isinstance(splits, list) else [splits]
        datasets = []
        for (name, amount), split in zip(pairs, splits if len(splits) > 1 else splits * len(pairs), strict=True):
            each = mixtures.Dataset(mixtures.named_files(str(name), None, None if split == "train" else split))
            if "." in str(amount):
                each.weight = float(amount)
            else:
                each.count = int(amount)
            datasets.append(each)
        mixtures.set_datasets(run, target, datasets)

    return function


def _set_max_samples(value: Any, run: Translation) -> None:
    run.set(f"{DATA}max_samples", value)
    if run.value(SOURCES) or isinstance(run.value(FILES), list):
        run.differs("the first rows of each dataset here, of all together there")


def _set_dataset(value: Any, run: Translation) -> None:
    run.set(FILES, r.source_name(str(value), None, run.get("dataset_config_name")))


def _set_length(value: Any, run: Translation) -> None:
    run.set("sequence_length", value)
    run.set(f"{DATA}truncation", "response_end")


def _set_saving(value: Any, run: Translation) -> None:
    if str(value).isdigit():
        run.set("save_steps", int(value))
    else:
        run.set("save_strategy", str(value))


def _set_limit(value: Any, run: Translation) -> None:
    if int(value) > 0:
        run.set("save_total_limit", int(value))
    else:
        run.drop("all checkpoints are kept there, save_total_limit here")


TABLE: r.Table = {
    "model_name_or_path": r.to("pretrain"),
    **dict.fromkeys(("loss_type", "dpo_loss_type"), r.by(_set_loss, "pref_loss")),
    **dict.fromkeys(("beta", "dpo_beta"), r.to("beta")),
    **dict.fromkeys(("gamma_beta_ratio", "dpo_gamma_beta_ratio"), r.by(_set_gamma, "gamma")),
    **dict.fromkeys(
        ("label_smoothing", "dpo_label_smoothing"), r.by(_set_smoothing, "label_smoothing", off="no label smoothing")
    ),
    "load_balancing_loss": r.by(
        lambda _, run: run.set(f"{MODEL}moe_aux_loss_coef", run.get("load_balancing_weight", 0.5)),
        f"{MODEL}moe_aux_loss_coef",
        off="off",
    ),
    "load_balancing_weight": r.part_of("load_balancing_loss", f"{MODEL}moe_aux_loss_coef"),
    **dict.fromkeys(("dataset_mixer", "dataset_mixer_list", "mixer_list"), r.by(_set_mixer(FILES), FILES, SOURCES)),
    **{f"{name}_splits": r.part_of(name, FILES) for name in ("dataset_mixer_list", "mixer_list")},
    "dataset_mixer_eval_list": r.by(_set_mixer(EVAL_FILES), EVAL_FILES, SETS),
    "dataset_mixer_eval_list_splits": r.part_of("dataset_mixer_eval_list", EVAL_FILES),
    "dataset_name": r.by(_set_dataset, FILES),
    "dataset_config_name": r.part_of("dataset_name", FILES),
    "dataset_mix_dir": r.lacks(f"name the files in {FILES}"),
    "train_file": r.to(FILES),
    "max_train_samples": r.by(_set_max_samples, f"{DATA}max_samples"),
    "max_seq_length": r.by(_set_length, "sequence_length", f"{DATA}truncation"),
    **r.kept(DATA, "preprocessing_num_workers"),
    **dict.fromkeys(("tokenizer_name", "tokenizer_name_or_path"), r.tokenizer("model_name_or_path")),
    "chat_template_name": r.template(),
    "add_bos": r.lacks("a BOS token is added where the chat template or the tokenizer adds one"),
    "model_revision": r.to(f"{MODEL}revision", neutral=("main",)),
    "tokenizer_revision": r.lacks("write it as NAME@REVISION in tokenizer_name_or_path", "main"),
    **r.kept(
        TRAINING,
        "learning_rate warmup_ratio weight_decay per_device_train_batch_size gradient_accumulation_steps "
        "gradient_checkpointing",
    ),
    "lr_scheduler_type": r.by(set_schedule, f"{TRAINING}lr_scheduler_type"),
    # a negative norm turns clipping off there, 0 here
    **dict.fromkeys(
        ("max_grad_norm", "clip_grad_norm"),
        r.converted(f"{TRAINING}max_grad_norm", lambda value: max(0.0, float(value))),
    ),
    **dict.fromkeys(("num_epochs", "num_train_epochs"), r.to("num_train_epochs")),
    "max_train_steps": r.by(set_max_steps, "max_steps", note="takes precedence over epochs"),
    "use_lora": r.lora_switch("read with `lora_rank`"),
    **r.quantization(_is_lora, {"use_qlora": 4}, "", "", is_double=True),
    **r.lora_rules(_is_lora, "lora_rank"),
    "use_flash_attn": r.switch(f"{MODEL}attn_implementation", "flash_attention_2"),
    **r.kept(MODEL, "attn_implementation trust_remote_code"),
    "tensor_parallel_degree": r.size("tp_size"),
    "context_parallel_degree": r.size("cp_size"),
    **r.kept("", "seed exp_name output_dir logging_steps"),
    "checkpointing_steps": r.by(_set_saving, "save_steps", "save_strategy"),
    "keep_last_n_checkpoints": r.by(_set_limit, "save_total_limit"),
    "resume_from_checkpoint": r.by(set_resume, "resume_from_checkpoint"),
    "with_tracking": r.converted("track_with", lambda value: ["console", "wandb"] if value else ["console"]),
    "report_to": HF["report_to"],
    **r.kept("tracker_kwargs.", "wandb_project wandb_entity"),
    "wandb_project_name": r.to("tracker_kwargs.wandb_project"),
    **r.lack(
        "AdamW in fp32 is the optimizer",
        {"use_8bit_optimizer": False, "optimizer_type": "adamw", "optimizer_kwargs": {}},
    ),
    **r.lack("the model's config cannot be changed", "additional_model_arguments config_name rope_scaling_factor"),
    "zero_stage": r.by(_set_zero, f"{STRATEGY}strategy_name", ENGINE.removesuffix(".")),
    **{name: _offload(name) for name in ("offload_optimizer", "offload_param")},
    **r.drop("the default transform tokenizes and cuts, as here", "transform_fn dataset_transform_fn target_columns"),
    **r.drop("a run uploads nothing; `thresher export --push` uploads the model", "push_to_hub save_to_hub"),
}
# memory, placement, kernels, caches, uploads, evaluation elsewhere and other methods
NEUTRAL = """
activation_checkpointing_* activation_memory_budget cache_* compile_model concatenated_forward config_hash cp_*
data_loader_seed dataset_cache_mode dataset_local_cache_dir dataset_skip_cache do_not_randomize_output_dir
dpo_use_paged_optimizer ephemeral_save_interval eval_priority eval_workspace fsdp_num_replicas fsdp_shard_degree
fused_optimizer get_tokenizer_fn ground_truths_key gs_bucket_path hf_* local_cache_dir log_grad_norm
loss_implementation low_cpu_mem_usage oe_eval_* overwrite_cache packing profiling reference_logprobs_cache_path
rope_scaling_* run_name send_slack_alerts sft_messages_key skip_cache sync_each_batch timeout tokenizer_files_hash
try_auto_save_to_beaker try_launch_beaker_eval_jobs use_fast use_liger_kernel use_slow_tokenizer wandb_group_name
zero_hpz_partition_size
"""


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    is_simpo = "simpo" in (given.get("loss_type"), given.get("dpo_loss_type"))
    gamma = {"gamma_beta_ratio": 0.3} if is_simpo and "dpo_gamma_beta_ratio" not in given else {}
    lora = {"lora_rank": 64, "lora_alpha": 16, "lora_dropout": 0.1} if given.get("use_lora") else {}
    rate = {"learning_rate": 2e-5, "lr_scheduler_type": "linear", "warmup_ratio": 0.1}
    sizes = {"per_device_train_batch_size": 8, "max_seq_length": 4096, "checkpointing_steps": 500}
    return {
        **({} if "dpo_loss_type" in given else {"loss_type": "dpo_norm"}),
        **({} if "dpo_beta" in given else {"beta": 5.0}),
        **({} if "clip_grad_norm" in given else {"max_grad_norm": 0.0}),
        **gamma,
        **rate,
        **sizes,
        **lora,
    }
