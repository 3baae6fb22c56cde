"""open-instruct (`dpo_tune_cache.py`, `dpo.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thresher.config.dialects.engines import set_deepspeed
from thresher.config.dialects.huggingface import TABLE as HF
from thresher.config.dialects.huggingface import set_max_steps, set_resume, set_schedule, source_name
from thresher.config.dialects.rules import (
    AXES,
    DATA,
    FILES,
    MODEL,
    TRAINING,
    Rule,
    by,
    drop,
    lack,
    lacks,
    part_of,
    planned,
    template,
    to,
    tokenizer,
)
from thresher.config.dialects.translation import Dialect, Translation, axis
from thresher.config.dialects.trl import if_lora

_LOSSES = {"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "simpo": "simpo"}


def _is_lora(run: Translation) -> bool:
    return bool(run.get("use_lora") or run.get("use_qlora"))


def _set_loss(value: Any, run: Translation) -> None:
    if value in _LOSSES:
        run.set("pref_loss", _LOSSES[value])
    else:
        run.lacks("use_wpo weighs pairs by another formula" if value == "wpo" else f"there is no loss {value}")


def _set_gamma(value: Any, run: Translation) -> None:
    if "simpo" in run.losses:
        run.set("gamma", float(value) * float(run.get("beta")))
        run.note("gamma = gamma_beta_ratio * beta")
    else:
        run.ignore("only for simpo")


def _set_smoothing(value: Any, run: Translation) -> None:
    if not value:
        run.ignore("no label smoothing")
    elif "sigmoid" in run.losses:
        run.set("label_smoothing", value)
    else:
        run.lacks(f"{run.losses[0]} has no label smoothing")


def _set_zero(value: Any, run: Translation) -> None:
    offloads = [name for name in ("offload_optimizer", "offload_param") if run.get(name)]
    set_deepspeed(run, {"zero_stage": int(value), **dict.fromkeys(offloads, True)})


def _offload(name: str) -> Rule:
    return by(lambda _, run: run.use(f"{AXES}{name}"), AXES.removesuffix("."), note="read with `zero_stage`")


def _set_mixer(value: Any, run: Translation) -> None:
    pairs = dict(value) if isinstance(value, Mapping) else dict(zip(value[::2], value[1::2], strict=False))
    files = [source_name(str(name)) for name in pairs]
    run.set(FILES, files[0] if len(files) == 1 else files)
    if any(float(share) != 1.0 for share in pairs.values()):
        run.plan("mixing", list(pairs.values()))


def _set_dataset(value: Any, run: Translation) -> None:
    run.set(FILES, source_name(str(value), None, run.get("dataset_config_name")))


def _set_length(value: Any, run: Translation) -> None:
    run.set("sequence_length", value)
    run.set(f"{DATA}truncation", "response_end")


def _set_saving(value: Any, run: Translation) -> None:
    if str(value).isdigit():
        run.set("save_steps", int(value))
    else:
        run.set("save_strategy", str(value))


def _set_tracking(value: Any, run: Translation) -> None:
    run.set("track_with", ["console", "wandb"] if value else ["console"])


def _set_limit(value: Any, run: Translation) -> None:
    if int(value) > 0:
        run.set("save_total_limit", int(value))
    else:
        run.drop("all checkpoints are kept there, save_total_limit here")


def _set_balance(value: Any, run: Translation) -> None:
    if value:
        run.set(f"{MODEL}moe_aux_loss_coef", run.get("load_balancing_weight", 0.5))
    else:
        run.ignore("off")


TABLE: dict[str, Rule] = {
    "model_name_or_path": to("pretrain"),
    "loss_type": by(_set_loss, "pref_loss"),
    "dpo_loss_type": by(_set_loss, "pref_loss"),
    "beta": to("beta"),
    "dpo_beta": to("beta"),
    "gamma_beta_ratio": by(_set_gamma, "gamma"),
    "dpo_gamma_beta_ratio": by(_set_gamma, "gamma"),
    "label_smoothing": by(_set_smoothing, "label_smoothing"),
    "dpo_label_smoothing": by(_set_smoothing, "label_smoothing"),
    "load_balancing_loss": by(_set_balance, f"{MODEL}moe_aux_loss_coef"),
    "dataset_mixer": by(_set_mixer, FILES),
    "dataset_mixer_list": by(_set_mixer, FILES),
    "mixer_list": by(_set_mixer, FILES),
    "dataset_name": by(_set_dataset, FILES),
    "dataset_config_name": part_of("dataset_name", FILES),
    "dataset_mix_dir": lacks("name the files in data_args.file_name"),
    "train_file": to(FILES),
    "max_train_samples": planned("max_samples"),
    "max_seq_length": by(_set_length, "sequence_length", f"{DATA}truncation"),
    "preprocessing_num_workers": to(f"{DATA}preprocessing_num_workers"),
    "tokenizer_name": tokenizer("model_name_or_path"),
    "tokenizer_name_or_path": tokenizer("model_name_or_path"),
    "chat_template_name": template(),
    "add_bos": lacks("a BOS token is added where the chat template or the tokenizer adds one"),
    "model_revision": planned("revision", "main"),
    "tokenizer_revision": lacks("write it as NAME@REVISION in tokenizer_name_or_path", "main"),
    "learning_rate": to(f"{TRAINING}learning_rate"),
    "lr_scheduler_type": by(set_schedule, f"{TRAINING}lr_scheduler_type"),
    "warmup_ratio": to(f"{TRAINING}warmup_ratio"),
    "weight_decay": to(f"{TRAINING}weight_decay"),
    "max_grad_norm": by(
        lambda v, run: run.set(f"{TRAINING}max_grad_norm", max(0.0, float(v))), f"{TRAINING}max_grad_norm"
    ),
    "clip_grad_norm": by(
        lambda v, run: run.set(f"{TRAINING}max_grad_norm", max(0.0, float(v))), f"{TRAINING}max_grad_norm"
    ),
    "per_device_train_batch_size": to(f"{TRAINING}per_device_train_batch_size"),
    "gradient_accumulation_steps": to(f"{TRAINING}gradient_accumulation_steps"),
    "num_epochs": to("num_train_epochs"),
    "num_train_epochs": to("num_train_epochs"),
    "max_train_steps": by(set_max_steps, "max_steps", note="takes precedence over epochs, as there"),
    "gradient_checkpointing": to(f"{TRAINING}gradient_checkpointing"),
    "use_lora": Rule(
        (f"{MODEL}lora_rank",),
        "with `lora_rank`",
        lambda v, run: run.use(f"{MODEL}lora_rank") if v else run.ignore("LoRA is off"),
    ),
    "use_qlora": planned("quantization"),
    "lora_rank": by(if_lora(_is_lora, f"{MODEL}lora_rank"), f"{MODEL}lora_rank"),
    "lora_alpha": by(if_lora(_is_lora, f"{MODEL}lora_alpha"), f"{MODEL}lora_alpha"),
    "lora_dropout": by(if_lora(_is_lora, f"{MODEL}lora_dropout"), f"{MODEL}lora_dropout"),
    "use_flash_attn": by(
        lambda v, run: run.set(f"{MODEL}attn_implementation", "flash_attention_2") if v else run.ignore("off"),
        f"{MODEL}attn_implementation",
    ),
    "attn_implementation": to(f"{MODEL}attn_implementation"),
    "trust_remote_code": to(f"{MODEL}trust_remote_code"),
    "tensor_parallel_degree": axis("tp_size"),
    "context_parallel_degree": axis("cp_size"),
    "seed": to("seed"),
    "exp_name": to("exp_name"),
    "output_dir": to("output_dir"),
    "logging_steps": to("logging_steps"),
    "checkpointing_steps": by(_set_saving, "save_steps", "save_strategy"),
    "keep_last_n_checkpoints": by(_set_limit, "save_total_limit"),
    "resume_from_checkpoint": by(set_resume, "resume_from_checkpoint"),
    "with_tracking": by(_set_tracking, "track_with"),
    "report_to": HF["report_to"],
    "wandb_project": to("tracker_kwargs.wandb_project"),
    "wandb_project_name": to("tracker_kwargs.wandb_project"),
    "wandb_entity": to("tracker_kwargs.wandb_entity"),
    **lack("AdamW in fp32 is the only optimizer", {"use_8bit_optimizer": False, "optimizer_type": "adamw"}),
    **lack("AdamW in fp32 is the only optimizer", {"optimizer_kwargs": {}}),
    **lack("the model's config cannot be changed", "additional_model_arguments config_name rope_scaling_factor"),
    **drop("the default transform tokenizes and cuts, as here", "transform_fn dataset_transform_fn target_columns"),
    "load_balancing_weight": part_of("load_balancing_loss", f"{MODEL}moe_aux_loss_coef"),
    "zero_stage": by(_set_zero, "actor_train.strategy_args.strategy_name", AXES.removesuffix(".")),
    "offload_optimizer": _offload("offload_optimizer"),
    "offload_param": _offload("offload_param"),
    **drop("the tokenizers give the same tokens", "use_slow_tokenizer use_fast"),
    **drop(
        "memory and placement; numbers do not change",
        "concatenated_forward packing dpo_use_paged_optimizer "
        "fsdp_shard_degree fsdp_num_replicas low_cpu_mem_usage use_liger_kernel fused_optimizer compile_model "
        "activation_memory_budget sync_each_batch timeout zero_hpz_partition_size activation_checkpointing_mode "
        "activation_checkpointing_modules cp_*",
    ),
    **drop("the reference is always cached", "cache_logprobs_only reference_logprobs_cache_path"),
    **drop(
        "prepared data is cached by its content",
        "overwrite_cache cache_mode local_cache_dir skip_cache dataset_cache_mode dataset_local_cache_dir "
        "hf_entity cache_dataset_only config_hash dataset_skip_cache",
    ),
    **drop(
        "nothing is uploaded or evaluated elsewhere",
        "push_to_hub hf_repo_id hf_repo_revision hf_repo_url try_launch_beaker_eval_jobs try_auto_save_to_beaker "
        "gs_bucket_path oe_eval_tasks oe_eval_max_length oe_eval_gpu_multiplier eval_workspace eval_priority "
        "hf_metadata_dataset save_to_hub send_slack_alerts ephemeral_save_interval wandb_group_name "
        "log_grad_norm profiling",
    ),
    **drop("kernels; numbers change by rounding only", "loss_implementation"),
    **drop("used with rope_scaling_factor", "rope_scaling_*"),
    **drop("the tokenizer is read as transformers does", "get_tokenizer_fn tokenizer_files_hash"),
    **drop("used by other methods", "ground_truths_key sft_messages_key"),
    **drop("output_dir is used as it is", "do_not_randomize_output_dir run_name"),
    **drop("the pair order follows from `seed`", "data_loader_seed mixer_list_splits dataset_mixer_list_splits"),
}


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    loss = {} if "dpo_loss_type" in given else {"loss_type": "dpo_norm"}
    beta = {} if "dpo_beta" in given else {"beta": 5.0}
    is_simpo = "simpo" in (given.get("loss_type"), given.get("dpo_loss_type"))
    gamma = {"gamma_beta_ratio": 0.3} if is_simpo and "dpo_gamma_beta_ratio" not in given else {}
    clip = {} if "clip_grad_norm" in given else {"max_grad_norm": 0.0}
    return {
        **loss,
        **beta,
        **gamma,
        **clip,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.1,
        "per_device_train_batch_size": 8,
        "max_seq_length": 4096,
        "checkpointing_steps": 500,
        **({"lora_rank": 64, "lora_alpha": 16, "lora_dropout": 0.1} if given.get("use_lora") else {}),
    }


OPEN_INSTRUCT = Dialect(
    name="open-instruct",
    title="open-instruct",
    table=TABLE,
    defaults=_defaults,
    marks=(
        frozenset({"model_name_or_path", "max_seq_length"}),
        frozenset({"model_name_or_path", "dataset_mixer_list"}),
        frozenset({"model_name_or_path", "mixer_list"}),
        frozenset({"model_name_or_path", "num_epochs"}),
        frozenset({"model_name_or_path", "with_tracking"}),
    ),
    programs=("open_instruct/dpo_tune_cache.py", "open_instruct/dpo.py", "dpo_tune_cache.py", "dpo_tune.py"),
)
