"""ROLL (`start_dpo_pipeline.py`): our keys are ROLL's, so most of them are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thresher.config.dialects import huggingface
from thresher.config.dialects.rules import (
    DATA,
    FILES,
    MODEL,
    TEMPLATES,
    TRAINING,
    VALIDATION_FILES,
    Function,
    Rule,
    by,
    drop,
    lack,
    lacks,
    part_of,
    planned,
    to,
)
from thresher.config.dialects.translation import Dialect, Translation
from thresher.config.dialects.trl import lora_targets
from thresher.config.roll import TOKENIZER_TEMPLATES

_AXES = {
    "tensor_model_parallel_size": "tp_size",
    "pipeline_model_parallel_size": "pp_size",
    "context_parallel_size": "cp_size",
    "virtual_pipeline_model_parallel_size": "virtual_pp_size",
    "tp_size": "tp_size",
    "pp_size": "pp_size",
    "cp_size": "cp_size",
}
_ATTENTION = {"fa2": "flash_attention_2", "auto": None, "disabled": "eager"}
# settings of Megatron and DeepSpeed for speed and memory
_ENGINE_ONLY = {
    "expert_model_parallel_size",
    "use_distributed_optimizer",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "moe_token_dispatcher_type",
    "bias_activation_fusion",
    "moe_grouped_gemm",
    "moe_shared_expert_overlap",
    "moe_layer_recompute",
    "bf16",
    "additional_configs",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "sequence_parallel",
    "gradient_accumulation_fusion",
}


def _set_ipo(value: Any, run: Translation) -> None:
    if value:
        run.set("pref_loss", "ipo_sum")
        run.note("ROLL's IPO sums over the tokens; `ipo` averages")
    else:
        run.set("pref_loss", "sigmoid")


def _set_engine(role: str) -> Function:
    def function(value: Any, run: Translation) -> None:
        axes = run.get(f"{role}.strategy_args.strategy_config") or {}
        is_sharded = any(key in _AXES and size not in (None, 1) for key, size in axes.items())
        ours = "fsdp2_train" if role == "actor_train" else "fsdp2_infer" if is_sharded else "hf_infer"
        run.set(f"{role}.strategy_args.strategy_name", ours)
        if ours != value:
            run.note("numbers agree up to rounding")

    return function


def _set_strategy(role: str) -> Function:
    def function(value: Any, run: Translation) -> None:
        unknown = []
        for key, setting in value.items():
            if key in _AXES:
                if setting not in (None, 1):
                    run.set(f"{role}.strategy_args.strategy_config.{_AXES[key]}", setting)
            elif key not in _ENGINE_ONLY:
                unknown.append(key)
        dropped = sorted(_ENGINE_ONLY & set(value))
        if unknown:
            run.lacks(f"no equivalent of {', '.join(unknown)}")
        elif dropped:
            run.note(f"engine settings without an equivalent, which do not change the numbers: {', '.join(dropped)}")

    return function


def _set_lora(value: Any, run: Translation) -> None:
    run.set(f"{MODEL}lora_target", lora_targets(value, run))
    run.set(f"{MODEL}lora_rank", run.get("actor_train.model_args.lora_rank", 8))


def _set_attention(target: str) -> Function:
    def function(value: Any, run: Translation) -> None:
        if name := _ATTENTION.get(value, value):
            run.set(target, name)
        else:
            run.ignore("chosen automatically")

    return function


def _set_dtype(target: str) -> Function:
    def function(value: Any, run: Translation) -> None:
        if value in ("fp16", "float16"):
            run.plan("fp16", "fp16")
        else:
            run.set(target, value)

    return function


def _set_trackers(value: Any, run: Translation) -> None:
    if value in ("tensorboard", "wandb", "mlflow"):
        run.set("track_with", ["console", value])
    else:
        run.drop("metrics.jsonl is always written")


def _set_template(value: Any, run: Translation) -> None:
    if value in TOKENIZER_TEMPLATES:
        run.set(f"{DATA}template", "auto")
    elif value in TEMPLATES:
        run.set(f"{DATA}template", TEMPLATES[value])
    else:
        run.plan("named_template", value)


_KEPT = (
    "exp_name",
    "seed",
    "output_dir",
    "logging_dir",
    "max_steps",
    "save_steps",
    "logging_steps",
    "eval_steps",
    "sequence_length",
    "pretrain",
    "beta",
    "chosen_key",
    "rejected_key",
    f"{TRAINING}learning_rate",
    f"{TRAINING}per_device_train_batch_size",
    f"{TRAINING}gradient_accumulation_steps",
    f"{TRAINING}weight_decay",
    f"{TRAINING}adam_beta1",
    f"{TRAINING}adam_beta2",
    f"{TRAINING}adam_epsilon",
    f"{TRAINING}warmup_ratio",
    f"{MODEL}model_name_or_path",
    f"{MODEL}lora_alpha",
    f"{MODEL}lora_dropout",
    f"{MODEL}trust_remote_code",
    f"{DATA}preprocessing_num_workers",
    "actor_train.device_mapping",
    "reference.device_mapping",
    "reference.model_args.model_name_or_path",
)


def _under(prefixes: str, names: str) -> str:
    return " ".join(f"{prefix}{name}" for prefix in prefixes.split() for name in names.split())


TABLE: dict[str, Rule] = {
    "ipo": by(_set_ipo, "pref_loss"),
    **{key: to(key) for key in _KEPT},
    "label_smoothing": by(
        lambda v, run: run.set("label_smoothing", v) if v else run.ignore("no label smoothing"), "label_smoothing"
    ),
    "max_grad_norm": to(f"{TRAINING}max_grad_norm"),
    f"{TRAINING}num_train_epochs": to("num_train_epochs"),
    f"{TRAINING}max_steps": Rule(note="the top-level max_steps counts"),
    f"{TRAINING}lr_scheduler_type": by(huggingface.set_schedule, f"{TRAINING}lr_scheduler_type"),
    f"{TRAINING}warmup_steps": by(huggingface.set_warmup_steps, f"{TRAINING}warmup_steps"),
    f"{MODEL}dtype": by(_set_dtype(f"{MODEL}dtype"), f"{MODEL}dtype"),
    "reference.model_args.dtype": by(_set_dtype("reference.model_args.dtype"), "reference.model_args.dtype"),
    f"{MODEL}attn_implementation": by(_set_attention(f"{MODEL}attn_implementation"), f"{MODEL}attn_implementation"),
    "reference.model_args.attn_implementation": by(
        _set_attention("reference.model_args.attn_implementation"), "reference.model_args.attn_implementation"
    ),
    f"{MODEL}disable_gradient_checkpointing": by(
        lambda v, run: run.set(f"{TRAINING}gradient_checkpointing", not v), f"{TRAINING}gradient_checkpointing"
    ),
    f"{MODEL}lora_target": by(_set_lora, f"{MODEL}lora_target", f"{MODEL}lora_rank"),
    f"{MODEL}lora_rank": part_of("lora_target", f"{MODEL}lora_rank"),
    f"{MODEL}additional_target": planned("trained_modules"),
    f"{MODEL}adapter_name_or_path": planned("adapter"),
    f"{MODEL}moe_aux_loss_coef": planned("moe_aux_loss", 0.0),
    f"{MODEL}freeze_module_prefix": planned("freeze"),
    f"{MODEL}model_config_kwargs": lacks("change the model's config.json"),
    FILES: to(FILES),
    VALIDATION_FILES: to(VALIDATION_FILES),
    f"{DATA}template": by(_set_template, f"{DATA}template"),
    "global_template": by(_set_template, f"{DATA}template"),
    f"{DATA}domain_interleave_probs": planned("mixing"),
    "actor_train.strategy_args.strategy_name": by(
        _set_engine("actor_train"), "actor_train.strategy_args.strategy_name"
    ),
    "reference.strategy_args.strategy_name": by(_set_engine("reference"), "reference.strategy_args.strategy_name"),
    "actor_train.strategy_args.strategy_config": by(
        _set_strategy("actor_train"), "actor_train.strategy_args.strategy_config"
    ),
    "reference.strategy_args.strategy_config": by(
        _set_strategy("reference"), "reference.strategy_args.strategy_config"
    ),
    "actor_train.infer_batch_size": to(f"{TRAINING}per_device_eval_batch_size"),
    "reference.infer_batch_size": to("reference.infer_batch_size"),
    "track_with": by(_set_trackers, "track_with"),
    "tracker_kwargs.project": to("tracker_kwargs.wandb_project"),
    "num_gpus_per_node": by(
        lambda v, run: (
            run.set("num_gpus_per_node", v) if run.get("actor_train.device_mapping") else run.ignore("no devices")
        ),
        "num_gpus_per_node",
    ),
    "max_ckpt_to_keep": by(
        lambda v, run: run.set("save_total_limit", v) if v else run.drop("save_total_limit checkpoints are kept"),
        "save_total_limit",
    ),
    "resume_from_checkpoint": by(huggingface.set_resume, "resume_from_checkpoint"),
    **drop("files are named in full", f"{DATA}dataset_dir", "validation.data_args.dataset_dir", "dataset_dir"),
    **drop("Hydra's own directories", "hydra"),
    **{key: to(key) for key in ("system_envs", "actor_train.system_envs", "reference.system_envs")},
    **drop("checkpoints are in output_dir", "checkpoint_config"),
    **drop("device_mapping names the devices", "num_nodes local_rank rpc_timeout"),
    **drop(
        "memory and placement; numbers do not change",
        "is_offload_states is_offload_optimizer_states_in_train_step",
    ),
    **drop("profiling", "profiler_timeline profiler_memory profiler_output_dir length_profiler_dir"),
    **drop("models are read from a directory or the Hugging Face Hub", "model_download_type"),
    **drop(
        "trackers have no such setting",
        "tracker_kwargs.log_dir tracker_kwargs.notes tracker_kwargs.tags tracker_kwargs.name "
        "tracker_kwargs.api_key tracker_kwargs.mode",
    ),
    **drop(
        "the worker's own settings; numbers do not change",
        _under(
            "actor_train. reference.",
            "model_args.model_type name worker_cls num_gpus_per_worker backend_timeout max_concurrency "
            "model_args.device_map model_args.gradient_checkpointing_use_reentrant logits_in_fp32 offload_nccl "
            "use_dynamic_batching_in_train max_tokens_per_microbatch_in_train use_dynamic_batching_in_infer "
            "max_tokens_per_microbatch_in_infer use_sequence_packing sequence_packing_args",
        ),
        _under(TRAINING, "dataloader_num_workers seed data_seed output_dir bf16 tf32 save_hf_model"),
        _under("validation.data_args.", "preprocessing_num_workers template"),
        "reference.model_args.disable_gradient_checkpointing",
        f"{DATA}dataset_type",
    ),
    **drop("images are not supported", _under(DATA, "image_* video_* audio_*")),
    **drop("rows name their columns; see chosen_key", _under(DATA, "id tag messages prompt response")),
    **drop(
        "used by other pipelines",
        _under(DATA, "eval_file_name custom_data_kwargs_func"),
        _under(MODEL, "num_labels autocast_adapter_dtype"),
        _under(
            "actor_train. reference.",
            "generating_args model_update_frequency mtp_training_mode opd_kl_coef pg_variant router_replay "
            "tag_included topr_negative_weight topr_positive_weight apply_loss_scale world_size "
            "sequence_length_round_in_infer sequence_length_round_in_train",
        ),
        "base_dir max_running_requests model_update_buffer_size_mb otlp_output_dir report_length_and_rewards "
        "rollout_* transfer_backend generate_opt_level router_args user_defined_rollout_loop_cls "
        "is_use_additional_prompts max_additional_running_prompts is_num_return_sequences_expand",
    ),
    f"{TRAINING}fp16": by(huggingface.set_fp16, note="fp16 is not supported"),
    **lack("give the number of context-parallel workers as cp_size", {f"{MODEL}ulysses_size": 1}),
    **drop(
        "not read by ROLL's DPO pipeline",
        "prompt_length response_length val_prompt_length val_sequence_length val_batch_size",
    ),
}


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    training = {
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1.0,
    }
    validation = {"eval_steps": 10} if VALIDATION_FILES in given else {}
    return {
        "ipo": False,
        "beta": 0.1,
        "max_steps": 500,
        "save_steps": 50,
        **validation,
        "track_with": "tensorboard",
        **{f"{TRAINING}{key}": value for key, value in training.items()},
        f"{MODEL}disable_gradient_checkpointing": False,
    }


ROLL = Dialect(
    name="roll",
    title="ROLL",
    table=TABLE,
    defaults=_defaults,
    marks=(frozenset({"actor_train"}),),
    programs=("start_dpo_pipeline.py",),
)
