"""ROLL (`start_dpo_pipeline.py`): our keys are ROLL's, so most of them are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thresher.config.dialects import huggingface
from thresher.config.dialects.engines import find_declared
from thresher.config.dialects.rules import (
    DATA,
    FILES,
    MODEL,
    TEMPLATES,
    TRAINING,
    VALIDATION_FILES,
    Function,
    Rule,
    adapter,
    by,
    drop,
    lacks,
    part_of,
    planned,
    to,
)
from thresher.config.dialects.translation import Dialect, Translation
from thresher.config.dialects.trl import lora_targets
from thresher.config.roll import MOVED, TOKENIZER_TEMPLATES, Moved, without_effect
from thresher.config.strategies import StrategySettings

_AXES = {
    "tensor_model_parallel_size": "tp_size",
    "pipeline_model_parallel_size": "pp_size",
    "context_parallel_size": "cp_size",
    "virtual_pipeline_model_parallel_size": "virtual_pp_size",
    "tp_size": "tp_size",
    "pp_size": "pp_size",
    "cp_size": "cp_size",
}
# settings of these engines have other names in ROLL
_NATIVE = ("fsdp2_train", "fsdp2_infer", "hf_infer")
_ATTENTION = {"fa2": "flash_attention_2", "auto": None, "disabled": "eager"}
# settings of engines for speed and memory
_ENGINE_ONLY = {
    "fsdp_size",
    "param_dtype",
    "reduce_dtype",
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
    "fp16",
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
        if value not in _NATIVE and find_declared(value) is not None:
            run.set(f"{role}.strategy_args.strategy_name", value)
            return
        axes = run.get(f"{role}.strategy_args.strategy_config") or {}
        is_sharded = any(key in _AXES and size not in (None, 1) for key, size in axes.items())
        ours = "fsdp2_train" if role == "actor_train" else "fsdp2_infer" if is_sharded else "hf_infer"
        run.set(f"{role}.strategy_args.strategy_name", ours)
        if ours != value:
            run.note("numbers agree up to rounding")

    return function


def _set_strategy(role: str) -> Function:
    def function(value: Any, run: Translation) -> None:
        name = run.get(f"{role}.strategy_args.strategy_name")
        declared = find_declared(name)
        if declared is not None and name not in _NATIVE:
            _keep_settings(role, name, declared.settings, value, run)
            return
        target = f"{role}.strategy_args.strategy_config."
        unknown = []
        for key, setting in value.items():
            if key in _AXES:
                if setting not in (None, 1):
                    run.set(f"{target}{_AXES[key]}", setting)
            elif key == "reshard_after_forward":
                if setting is False:
                    run.set(f"{target}zero_stage", 2)
            elif key == "offload_policy":
                if setting:
                    run.set(f"{target}cpu_offload", True)
            elif key == "fp16" and role == "actor_train" and isinstance(setting, dict):
                _set_loss_scale(setting, run)
            elif key not in _ENGINE_ONLY:
                unknown.append(key)
        dropped = sorted(_ENGINE_ONLY & set(value))
        if unknown:
            run.lacks(f"no equivalent of {', '.join(unknown)}")
        elif dropped:
            run.note(f"engine settings without an equivalent, which do not change the numbers: {', '.join(dropped)}")

    return function


def _keep_settings(
    role: str, name: str, settings: type[StrategySettings], given: Mapping[str, Any], run: Translation
) -> None:
    """Keep the settings that the engine has; validation of the config checks their values."""
    known = {*settings.model_fields, *settings.spellings}
    kept = {key: setting for key, setting in given.items() if key in known and setting is not None}
    if kept:
        run.set(f"{role}.strategy_args.strategy_config", kept)
    if isinstance(fp16 := given.get("fp16"), dict) and role == "actor_train":
        _set_loss_scale(fp16, run)
    left = [key for key, setting in given.items() if key not in known and setting is not None]
    if unknown := [key for key in left if key not in _ENGINE_ONLY]:
        run.lacks(f"{name} has no setting {', '.join(unknown)}")
    elif left:
        run.note(f"settings without an equivalent, which do not change the numbers: {', '.join(left)}")


def _set_loss_scale(settings: Mapping[str, Any], run: Translation) -> None:
    """Read DeepSpeed's section of fp16."""
    if run.get(f"{MODEL}dtype") in ("fp16", "float16"):
        for name in ("initial_scale_power", "loss_scale_window"):
            if name in settings:
                run.set(f"{TRAINING}{name}", settings[name])


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
        run.set(target, {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(value, value))

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
    f"{MODEL}freeze_module_prefix",
    f"{DATA}preprocessing_num_workers",
    f"{DATA}dataset_dir",
    "validation.data_args.dataset_dir",
    FILES,
    VALIDATION_FILES,
    "system_envs",
    "actor_train.system_envs",
    "reference.system_envs",
    "reference.infer_batch_size",
    "tracker_kwargs.name",
    "tracker_kwargs.notes",
    "tracker_kwargs.tags",
    "actor_train.device_mapping",
    "reference.device_mapping",
    "reference.model_args.model_name_or_path",
)


def _under(prefixes: str, names: str) -> str:
    return " ".join(f"{prefix}{name}" for prefix in prefixes.split() for name in names.split())


def _moved(moved: Moved) -> Rule:
    def function(value: Any, run: Translation) -> None:
        ours = moved.convert(value)
        if ours is None:
            run.ignore("off")
        elif run.gives(moved.target) and run.get(moved.target) != ours:
            run.ignore(f"{moved.target} is set too and counts")
        else:
            run.set(moved.target, ours)

    return by(function, moved.target)


# keys that are also read directly, see config/roll.py; those below need a translation that only an import makes
SHARED_RULES: dict[str, Rule] = {
    **{key: _moved(moved) for key, moved in MOVED.items()},
    **{key: Rule(note=reason) for key, reason in without_effect().items()},
}
TABLE: dict[str, Rule] = SHARED_RULES | {
    "ipo": by(_set_ipo, "pref_loss"),
    **{key: to(key) for key in _KEPT},
    "label_smoothing": by(
        lambda v, run: run.set("label_smoothing", v) if v else run.ignore("no label smoothing"), "label_smoothing"
    ),
    f"{TRAINING}lr_scheduler_type": by(huggingface.set_schedule, f"{TRAINING}lr_scheduler_type"),
    f"{TRAINING}warmup_steps": by(huggingface.set_warmup_steps, f"{TRAINING}warmup_steps"),
    f"{MODEL}dtype": by(_set_dtype(f"{MODEL}dtype"), f"{MODEL}dtype"),
    "reference.model_args.dtype": by(_set_dtype("reference.model_args.dtype"), "reference.model_args.dtype"),
    f"{MODEL}attn_implementation": by(_set_attention(f"{MODEL}attn_implementation"), f"{MODEL}attn_implementation"),
    "reference.model_args.attn_implementation": by(
        _set_attention("reference.model_args.attn_implementation"), "reference.model_args.attn_implementation"
    ),
    f"{MODEL}lora_target": by(_set_lora, f"{MODEL}lora_target", f"{MODEL}lora_rank"),
    f"{MODEL}lora_rank": part_of("lora_target", f"{MODEL}lora_rank"),
    f"{MODEL}additional_target": planned("trained_modules"),
    f"{MODEL}adapter_name_or_path": adapter(),
    f"{MODEL}moe_aux_loss_coef": planned("moe_aux_loss", 0.0),
    f"{MODEL}model_config_kwargs": lacks("change the model's config.json"),
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
    "track_with": by(_set_trackers, "track_with"),
    # not moved: an import does not write a secret
    "tracker_kwargs.api_key": Rule(note="secrets are not written; use `wandb login` or WANDB_API_KEY"),
    "num_gpus_per_node": by(
        lambda v, run: (
            run.set("num_gpus_per_node", v) if run.get("actor_train.device_mapping") else run.ignore("no devices")
        ),
        "num_gpus_per_node",
    ),
    "resume_from_checkpoint": by(huggingface.set_resume, "resume_from_checkpoint"),
    **drop("Hydra's own directories", "hydra"),
    **drop("profiling", "length_profiler_dir"),
    **drop(
        "the worker's own settings; numbers do not change",
        _under("actor_train. reference.", "model_args.model_type max_concurrency"),
        _under(TRAINING, "data_seed tf32 save_hf_model"),
        _under("validation.data_args.", "preprocessing_num_workers template"),
    ),
    **drop("images are not supported", _under(DATA, "image_* video_* audio_*")),
    **drop("rows name their columns; see chosen_key", _under(DATA, "id tag messages response")),
    **drop(
        "used by other pipelines",
        _under(DATA, "custom_data_kwargs_func"),
        _under(MODEL, "num_labels autocast_adapter_dtype"),
        _under(
            "actor_train. reference.",
            "generating_args model_update_frequency mtp_training_mode opd_kl_coef pg_variant router_replay "
            "tag_included topr_negative_weight topr_positive_weight world_size",
        ),
        "max_running_requests otlp_output_dir report_length_and_rewards "
        "rollout_* transfer_backend generate_opt_level router_args user_defined_rollout_loop_cls "
        "is_use_additional_prompts max_additional_running_prompts is_num_return_sequences_expand",
    ),
    **drop("not read by ROLL's DPO pipeline", "response_length"),
}


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    training = {
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1.0,
    }
    is_evaluated = VALIDATION_FILES in given or f"{DATA}eval_file_name" in given
    validation = {"eval_steps": 10} if is_evaluated else {}
    return {
        "ipo": False,
        "beta": 0.1,
        **({} if f"{TRAINING}max_steps" in given else {"max_steps": 500}),
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
