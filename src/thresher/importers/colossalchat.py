"""ColossalChat (`train_dpo.py`), as a shell script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thresher.importers import rules as r
from thresher.importers.engines import has_reference_model
from thresher.importers.translation import DATA, ENGINE, EVAL_FILES, FILES, MODEL, TRAINING, Translation

_DEFAULT_SIMPO_GAMMA = 1.4
_LORA_ALPHA = 32
_PLUGINS = ("ddp", "zero2", "zero2_cpu", "gemini", "gemini_auto", "3d")
# what to set when device_mapping has several workers
_WITH_MORE_WORKERS = {
    "ddp": "; set dp_replicate to the number of workers if you add some",
    "zero2": "; set zero_stage: 2 if you add workers",
    "zero2_cpu": "; set zero_stage: 2 and cpu_offload if you add workers",
    "gemini": "",
    "gemini_auto": "",
}
# modes of sequence parallelism with their own workers; the others use the workers of tp
_SEQUENCE_MODES = ("all_to_all", "ring_attn")


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


def _set_loss_mask(_: Any, run: Translation) -> None:
    run.set("apply_loss_mask", False)
    run.differs("all tokens but the first are scored; ColossalChat scores the padding too")


def _set_lora(value: Any, run: Translation) -> None:
    """Read the JSON file of LoRA. ColossalChat's linear layers ignore its alpha and dropout: they have 32 and 0."""
    if isinstance(value, str):
        try:
            value = json.loads(Path(value).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return run.lacks(f"cannot be read ({error}); put the JSON file there, or set lora_rank and lora_target")
    if not value.get("r"):
        return run.ignore("rank 0: LoRA is off")
    if value.get("lora_train_bias", "none") != "none":
        return run.lacks("lora_train_bias: biases cannot be trained besides the adapters")
    run.set(f"{MODEL}lora_rank", int(value["r"]))
    run.set(f"{MODEL}lora_alpha", _LORA_ALPHA)
    run.set(f"{MODEL}lora_dropout", 0.0)
    given = [name for name in ("lora_alpha", "linear_lora_dropout") if name in value]
    if given:
        run.note(f"ColossalChat's linear layers ignore {' and '.join(given)}: alpha is 32, and there is no dropout")
    if value.get("lora_initialization_method") == "PiSSA":
        run.set(f"{MODEL}lora_init", "pissa_niter_4")
    if targets := value.get("target_modules"):
        run.set(f"{MODEL}lora_target", list(targets))
    else:
        run.set(f"{MODEL}lora_target", ["all-linear"])
        run.differs("ColossalChat adapts the embedding and the LM head too; here all linear modules but the LM head")
    return None


def _set_data(target: str) -> r.Function:
    def function(value: Any, run: Translation) -> None:
        r.set_sources(run, target, value if isinstance(value, list) else [value])
        run.set(target.replace("file_name", "template"), "raw")
        run.note("the token ids are read as they are; template: raw, because no text is rendered")
        if target == EVAL_FILES:
            run.set("eval_strategy", "epoch")

    return function


def _set_plugin(value: Any, run: Translation) -> None:
    """Set the layout of weights, gradients and optimizer state; docs/migrate/from-roll.md has a table."""
    if value not in _PLUGINS:
        run.lacks(f"the plugins are {', '.join(_PLUGINS)}")
    elif value == "3d":
        _set_zero_of_3d(int(run.get("zero_stage", 0)), run)
    elif run.num_devices == 1:
        run.drop(f"one worker holds the whole model; numbers do not change{_WITH_MORE_WORKERS[value]}")
    elif value == "ddp":
        run.set(f"{ENGINE}dp_replicate", run.num_devices)
    else:
        run.set(f"{ENGINE}zero_stage", 2 if value in ("zero2", "zero2_cpu") else 3)
        if value == "zero2_cpu":
            run.set(f"{ENGINE}cpu_offload", True)
        if value == "gemini_auto":
            run.note("Gemini moves weights to host memory when a device is full; cpu_offload keeps them there")
        if value in ("gemini", "gemini_auto") and has_reference_model(run):
            run.set("reference.strategy_args.strategy_name", "fsdp2_infer")


def _set_zero_of_3d(stage: int, run: Translation) -> None:
    """Stage 0 replicates the model over the data-parallel ranks, 1 shards optimizer state, 2 also gradients."""
    per_data_rank = int(run.get("tp", 1)) * int(run.get("pp", 1)) * _context_size(run)
    replicas, shards = run.num_devices // per_data_rank, run.num_devices // per_data_rank * _context_size(run)
    if shards <= 1:
        run.drop("no two workers shard the model; numbers do not change")
    elif stage:
        run.set(f"{ENGINE}zero_stage", stage)
    elif replicas > 1:
        run.set(f"{ENGINE}dp_replicate", replicas)
    else:
        run.ignore("one replica")


def _context_size(run: Translation) -> int:
    """Workers that split a sequence besides the workers of tp, which `split_gather` and `ring` use."""
    return int(run.get("sp", 1)) if run.get("sp_mode", "split_gather") in _SEQUENCE_MODES else 1


def _set_sequence_size(value: Any, run: Translation) -> None:
    if value != 1 and run.get("sp_mode", "split_gather") not in _SEQUENCE_MODES:
        run.drop("splits activations over the workers of tp; numbers do not change")
    else:
        r.set_size(value, run, "cp_size")


def _set_offload(_: Any, run: Translation) -> None:
    if not run.get("zero_stage"):
        run.ignore("ColossalChat offloads with zero_stage 1 and 2 only")
    elif run.value(f"{ENGINE}zero_stage") is None:
        run.drop("no two workers shard the model; numbers do not change")
    else:
        run.set(f"{ENGINE}cpu_offload", True)


def _set_reference_axis(value: Any, run: Translation) -> None:
    if value == 1:
        run.ignore("one worker")
    else:
        run.set("reference.strategy_args.strategy_name", "fsdp2_infer")
        run.set("reference.strategy_args.strategy_config.tp_size", value)


TABLE: r.Table = {
    **r.kept("", "pretrain beta"),
    "loss_type": r.by(_set_loss, "pref_loss", "gamma", "reference.mode"),
    "length_normalization": r.part_of("loss_type", "pref_loss"),
    "disable_reference_model": r.part_of("loss_type", "pref_loss"),
    "gamma": r.by(_set_gamma, "gamma"),
    "disable_loss_mask": r.by(_set_loss_mask, "apply_loss_mask", off="the responses are scored"),
    **r.kept(TRAINING, "lr_scheduler_type adam_beta2 warmup_steps warmup_ratio weight_decay"),
    "lr": r.to(f"{TRAINING}learning_rate"),
    "grad_clip": r.to(f"{TRAINING}max_grad_norm"),
    "batch_size": r.to(f"{TRAINING}per_device_train_batch_size"),
    "accumulation_steps": r.to(f"{TRAINING}gradient_accumulation_steps"),
    "max_epochs": r.to("num_train_epochs"),
    "max_length": r.to("sequence_length"),
    "mixed_precision": r.to(f"{MODEL}dtype"),
    "grad_checkpoint": r.to(f"{TRAINING}gradient_checkpointing"),
    "use_flash_attn": r.switch(f"{MODEL}attn_implementation", "flash_attention_2"),
    "lora_config": r.by(
        _set_lora,
        *(f"{MODEL}{name}" for name in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "lora_init")),
        note="a JSON file, or its content",
    ),
    "dataset": r.by(_set_data(FILES), FILES, f"{DATA}template"),
    "eval_dataset": r.by(_set_data(EVAL_FILES), EVAL_FILES, "eval_strategy"),
    "tokenizer_dir": r.tokenizer("pretrain"),
    "checkpoint_path": r.lacks(r.OTHER_CHECKPOINT),
    "save_interval": r.to("save_steps"),
    "save_dir": r.to("output_dir"),
    "log_dir": r.to("logging_dir"),
    "use_wandb": r.converted("track_with", lambda value: ["console", "tensorboard", *(["wandb"] if value else [])]),
    "plugin": r.by(
        _set_plugin,
        *(f"{ENGINE}{name}" for name in ("zero_stage", "dp_replicate", "cpu_offload")),
        note="see [From ROLL or ColossalChat](../../migrate/from-roll.md)",
    ),
    "zero_stage": r.part_of("plugin", f"{ENGINE}zero_stage"),
    "zero_cpu_offload": r.by(_set_offload, f"{ENGINE}cpu_offload", off="off"),
    "tp": r.size("tp_size"),
    "pp": r.size("pp_size"),
    "sp": r.by(_set_sequence_size, f"{ENGINE}cp_size", note="with sp_mode all_to_all or ring_attn"),
    "ref_tp": r.by(_set_reference_axis, "reference.strategy_args.strategy_config.tp_size"),
}
NEUTRAL = "config_file enable_sequence_parallelism microbatch_size model_type sp_mode"


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    loss = {"loss_type": "dpo_loss", "beta": 0.1}
    rate = {"lr": 5e-6, "lr_scheduler_type": "cosine_with_min_lr", "adam_beta2": 0.95, "weight_decay": 0.1}
    warmup = {} if "warmup_steps" in given else {"warmup_ratio": 0.025}
    sizes = {"batch_size": 4, "max_epochs": 3, "max_length": 2048, "mixed_precision": "fp16", "save_interval": 1000}
    return {**loss, **rate, **warmup, **sizes}
