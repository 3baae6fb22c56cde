"""ColossalChat (`train_dpo.py`), as a shell script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thresher.config.dialects.rules import (
    FILES,
    MODEL,
    TRAINING,
    VALIDATION_FILES,
    Rule,
    by,
    drop,
    lacks,
    part_of,
    planned,
    to,
)
from thresher.config.dialects.translation import Dialect, Translation, axis

_AXIS = "actor_train.strategy_args.strategy_config"
_DEFAULT_SIMPO_GAMMA = 1.4


def _set_loss(value: Any, run: Translation) -> None:
    normalized = bool(run.get("length_normalization"))
    if value == "simpo_loss" or (run.get("disable_reference_model") and normalized):
        run.set("pref_loss", "simpo")
        run.set("gamma", run.get("gamma") or (_DEFAULT_SIMPO_GAMMA if value == "simpo_loss" else 0.0))
    else:
        run.set("pref_loss", "sigmoid_norm" if normalized else "sigmoid")
        if run.get("disable_reference_model"):
            run.set("reference.mode", "none")


def _set_gamma(value: Any, run: Translation) -> None:
    if "simpo" in run.losses:
        run.use("gamma")
    elif value:
        run.set("gamma", value)
    else:
        run.ignore("no margin")


def _set_precision(value: Any, run: Translation) -> None:
    if value == "bf16":
        run.set(f"{MODEL}dtype", "bf16")
    else:
        run.plan("fp16", "fp16")


def _set_data(target: str) -> Any:
    def function(value: Any, run: Translation) -> None:
        directories = value if isinstance(value, list) else [value]
        run.set(target, directories[0] if len(directories) == 1 else directories)
        run.lacks("tokenized Arrow of ColossalChat cannot be read; give the JSONL files that it was prepared from")

    return function


def _set_tokenizer(value: Any, run: Translation) -> None:
    if value == run.get("pretrain"):
        run.ignore("the model's tokenizer")
    else:
        run.plan("tokenizer", value)


def _set_plugin(value: Any, run: Translation) -> None:
    if value == "zero2_cpu":
        run.set(f"{_AXIS}.cpu_offload", True)
        run.note("FSDP2 with weights and optimizer state in host memory")
    else:
        run.drop("FSDP2 shards the model over the workers of device_mapping; numbers agree up to rounding")


def _set_reference_axis(value: Any, run: Translation) -> None:
    if value == 1:
        run.ignore("one worker")
    else:
        run.set("reference.strategy_args.strategy_name", "fsdp2_infer")
        run.set("reference.strategy_args.strategy_config.tp_size", value)


TABLE: dict[str, Rule] = {
    "pretrain": to("pretrain"),
    "loss_type": by(_set_loss, "pref_loss", "gamma", "reference.mode"),
    "length_normalization": part_of("loss_type", "pref_loss"),
    "disable_reference_model": part_of("loss_type", "pref_loss"),
    "gamma": by(_set_gamma, "gamma"),
    "beta": to("beta"),
    "disable_loss_mask": planned("loss_on_prompt"),
    "lr": to(f"{TRAINING}learning_rate"),
    "lr_scheduler_type": to(f"{TRAINING}lr_scheduler_type"),
    "adam_beta2": to(f"{TRAINING}adam_beta2"),
    "warmup_steps": to(f"{TRAINING}warmup_steps"),
    "warmup_ratio": to(f"{TRAINING}warmup_ratio"),
    "weight_decay": to(f"{TRAINING}weight_decay"),
    "grad_clip": to(f"{TRAINING}max_grad_norm"),
    "batch_size": to(f"{TRAINING}per_device_train_batch_size"),
    "accumulation_steps": to(f"{TRAINING}gradient_accumulation_steps"),
    "max_epochs": to("num_train_epochs"),
    "max_length": to("sequence_length"),
    "mixed_precision": by(_set_precision, f"{MODEL}dtype"),
    "grad_checkpoint": to(f"{TRAINING}gradient_checkpointing"),
    "use_flash_attn": by(
        lambda v, run: run.set(f"{MODEL}attn_implementation", "flash_attention_2") if v else run.ignore("off"),
        f"{MODEL}attn_implementation",
    ),
    "lora_config": lacks("a JSON file: set lora_rank, lora_alpha, lora_dropout and lora_target"),
    "dataset": by(_set_data(FILES), FILES),
    "eval_dataset": by(_set_data(VALIDATION_FILES), VALIDATION_FILES),
    "tokenizer_dir": by(_set_tokenizer, note="only the model's own tokenizer"),
    "checkpoint_path": lacks("checkpoints of another trainer cannot be resumed; give the model as `pretrain`"),
    "save_interval": to("save_steps"),
    "save_dir": to("output_dir"),
    "log_dir": to("logging_dir"),
    "use_wandb": by(
        lambda v, run: run.set("track_with", ["console", "tensorboard", *(["wandb"] if v else [])]), "track_with"
    ),
    "plugin": by(_set_plugin, f"{_AXIS}.cpu_offload", note="FSDP2 shards the model; zero2_cpu sets cpu_offload"),
    "zero_cpu_offload": to(f"{_AXIS}.cpu_offload"),
    "tp": axis("tp_size"),
    "pp": axis("pp_size"),
    "sp": axis("cp_size"),
    "ref_tp": by(_set_reference_axis, "reference.strategy_args.strategy_config.tp_size"),
    **drop("found from the model's files", "model_type"),
    **drop(
        "memory and placement; numbers do not change",
        "zero_stage sp_mode enable_sequence_parallelism microbatch_size",
    ),
    **drop("the config is in each checkpoint", "config_file"),
}


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    warmup = {} if "warmup_steps" in given else {"warmup_ratio": 0.025}
    return {
        "loss_type": "dpo_loss",
        "beta": 0.1,
        "lr": 5e-6,
        "lr_scheduler_type": "cosine_with_min_lr",
        **warmup,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "batch_size": 4,
        "max_epochs": 3,
        "max_length": 2048,
        "mixed_precision": "fp16",
        "save_interval": 1000,
    }


COLOSSALCHAT = Dialect(
    name="colossalchat",
    title="ColossalChat",
    table=TABLE,
    defaults=_defaults,
    marks=(frozenset({"pretrain", "plugin"}), frozenset({"accumulation_steps", "lr"})),
    programs=("train_dpo.py",),
)
