"""Keys of transformers' TrainingArguments, which TRL, LLaMA-Factory and ms-swift share."""

from __future__ import annotations

from typing import Any

from thresher.config.roles import SCHEDULES
from thresher.importers import rules as r
from thresher.importers.engines import DEEPSPEED
from thresher.importers.translation import DATA, MODEL, SETS, TRAINING, Rule, Translation

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
ADAMW = {"adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla", "adamw"}
_BITSANDBYTES = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "adamw_torch_4bit"), "adamw_8bit"),
    "paged_adamw_8bit": "paged_adamw_8bit",
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "paged_adamw_32bit"),
}
_SCHEDULE_FREE = "schedule_free_adamw"
_BEST = ("loss", "rewards/accuracies", "rewards/margins")


def set_optimizer(value: Any, run: Translation) -> None:
    name = str(value).lower()
    if name in ADAMW:
        run.ignore("AdamW is the optimizer here")
    elif name in _BITSANDBYTES and run.get("deepspeed"):
        run.differs("AdamW is used, with its state in fp32: DeepSpeed has no other optimizer here")
    elif name in _BITSANDBYTES:
        run.set(f"{TRAINING}optim", _BITSANDBYTES[name])
        if name.startswith("adamw_torch"):
            run.differs("bitsandbytes' 8-bit AdamW is used instead of torchao's")
        elif "8bit" in name:
            run.differs("embeddings have their state in 8 bits too")
    elif name in ("rmsprop", "sgd", _SCHEDULE_FREE):
        run.set(f"{TRAINING}optim", name)
    elif name in ("adafactor", "muon"):
        run.set(f"{TRAINING}optim", name)
        run.differs(f"torch's {name} is used, with its defaults")
    else:
        run.lacks(r.OTHER_OPTIMIZER)


def set_schedule(value: Any, run: Translation) -> None:
    """Read a schedule; min_lr and power are in `lr_scheduler_kwargs`."""
    if _SCHEDULE_FREE in (run.get("optim"), run.get("optimizer")):
        warms_up = value != "constant" and (run.get("warmup_steps") or run.get("warmup_ratio"))
        run.set(f"{TRAINING}lr_scheduler_type", "constant_with_warmup" if warms_up else "constant")
        if value not in ("constant", "constant_with_warmup"):
            run.differs("the rate of a schedule-free optimizer stays at its peak")
        return
    if value == "cosine_with_restarts":
        run.set(f"{TRAINING}lr_scheduler_type", "cosine")
        run.note("one cycle")
    elif value in SCHEDULES:
        run.set(f"{TRAINING}lr_scheduler_type", value)
    else:
        run.lacks(f"the schedules are {', '.join(SCHEDULES)}")
    if value == "polynomial":
        run.differs("decays to 0; transformers decays to lr_end, 1e-7 by default")


def set_schedule_arguments(value: Any, run: Translation) -> None:
    arguments = dict(value) if isinstance(value, dict) else {}
    peak = run.get("learning_rate") or 1.0
    if "min_lr_rate" in arguments or "min_lr" in arguments:
        rate = arguments.pop("min_lr_rate", None)
        lowest = arguments.pop("min_lr", None)
        run.set(f"{TRAINING}min_lr_ratio", rate if rate is not None else r.ratio(lowest or 0.0, peak))
    if "power" in arguments:
        run.set(f"{TRAINING}lr_power", arguments.pop("power"))
    if arguments:
        run.lacks(f"no key for {', '.join(arguments)}")


def set_warmup_steps(value: Any, run: Translation) -> None:
    """Read a number of steps; transformers 5 reads a value below 1 as a fraction of the run."""
    name = "warmup_ratio" if 0 < float(value) < 1 else "warmup_steps"
    run.set(f"{TRAINING}{name}", float(value) if name == "warmup_ratio" else int(value))


def set_max_steps(value: Any, run: Translation) -> None:
    """Read a number of steps, which takes precedence over epochs: the data repeats until then."""
    if value > 0:
        run.unset("num_train_epochs", "max_steps takes precedence, there and here")
        run.set("max_steps", value)
    else:
        run.ignore("no limit")


def set_trackers(value: Any, run: Translation) -> None:
    names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
    known = [name for name in names if name in TRACKERS]
    run.set("track_with", ["console", *known])
    if others := [name for name in names if name not in (*TRACKERS, "none", "all")]:
        run.note(f"no tracker {', '.join(others)}; metrics.jsonl is always written")


def set_cadence(target: str, strategy_key: str, strategy: str) -> r.Function:
    """Make a function that sets a number of steps if its strategy is `steps`."""

    def function(value: Any, run: Translation) -> None:
        old = run.get("evaluation_strategy", strategy) if strategy_key == "eval_strategy" else strategy
        if run.get(strategy_key, old) != "steps":
            run.ignore(f"only with {strategy_key}: steps")
        elif float(value) < 1:
            run.drop(f"a fraction of the run cannot be given; set {target} in steps")
        else:
            run.set(target, int(value))

    return function


def set_strategy(target: str) -> r.Function:
    """Make a function that reads `steps`, `epoch` or `no`."""

    def function(value: Any, run: Translation) -> None:
        if value in ("no", False) and target == "save_strategy":
            run.set(target, "no")
            run.differs("the final step is always saved")
        elif value in ("no", False):
            run.ignore("no evaluation during training")
        elif value in ("steps", "epoch"):
            run.set(target, value)
            if (value, target) == ("steps", "eval_strategy") and not run.get("eval_steps"):
                run.set("eval_steps", int(run.get("logging_steps", 500)))
                run.note("every logging_steps, because eval_steps is not set")
        else:
            run.drop("steps, epoch or no; the best checkpoint is kept as well")

    return function


def set_best_metric(value: Any, run: Translation) -> None:
    name = str(value).removeprefix("eval_")
    # with several sets, eval_SET_loss
    of_sets = {f"{each}_{metric}": f"{each}/{metric}" for each in run.value(SETS) or {} for metric in _BEST}
    if name in _BEST or name in of_sets:
        run.set("metric_for_best_model", f"eval/{of_sets.get(name, name)}")
    else:
        run.drop("selects the best checkpoint only; eval/loss is used")


def set_bf16(value: Any, run: Translation) -> None:
    if value in (True, "auto", "full"):
        run.set(f"{MODEL}dtype", "bf16")
    elif run.get("fp16") is True or run.get("float16") is True:
        run.ignore("fp16 is on")
    else:
        run.set(f"{MODEL}dtype", "fp32")


def set_fp16(value: Any, run: Translation) -> None:
    if value is True:
        run.set(f"{MODEL}dtype", "fp16")
    else:
        run.ignore("off")


def set_weight_dtype(is_full: Any) -> r.Function:
    """Make a function that reads the dtype of the loaded weights; `is_full(run)` if all weights are trained."""

    def function(value: Any, run: Translation) -> None:
        name = str(value).removeprefix("torch.")
        if name in ("float16", "fp16", "half") and run.get("bf16"):
            run.differs("master weights are fp32 here, and bf16 is the precision of the computation")
        elif name in ("float16", "fp16", "half"):
            run.set(f"{MODEL}dtype", "fp16")
            run.note("master weights are fp32 here")
        elif name in ("float32", "fp32"):
            run.set(f"{MODEL}master_dtype", "fp32")
        elif not is_full(run):
            run.ignore("the frozen weights are computed in bf16 in either case")
        elif run.get("deepspeed") or run.get("fsdp"):
            run.ignore("DeepSpeed and FSDP keep fp32 master weights, as here")
        elif name in ("bfloat16", "bf16") and run.value(f"{MODEL}dtype") != "fp32":
            run.set(f"{MODEL}dtype", "bf16")
            run.set(f"{MODEL}master_dtype", "bf16")
            run.note("weights and optimizer state in bf16 lose small updates; remove master_dtype for fp32")
        else:
            run.differs("master weights are fp32 here, whatever the dtype of the files")

    return function


def set_resume(value: Any, run: Translation) -> None:
    if value in (True, "true", "True"):
        run.ignore("a run resumes from the newest checkpoint in its output_dir")
    elif value in (False, "false", "False"):
        run.set("resume_from_checkpoint", False)
    else:
        run.lacks(r.OTHER_CHECKPOINT)


TABLE: r.Table = {
    **r.kept(
        TRAINING,
        "learning_rate per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps weight_decay "
        "adam_beta1 adam_beta2 adam_epsilon max_grad_norm warmup_ratio gradient_checkpointing torch_compile",
    ),
    **r.kept("", "num_train_epochs seed output_dir logging_dir eval_on_start save_total_limit"),
    "max_steps": r.by(set_max_steps, "max_steps", note="takes precedence over epochs"),
    "lr_scheduler_type": r.by(set_schedule, f"{TRAINING}lr_scheduler_type"),
    "lr_scheduler_kwargs": r.by(set_schedule_arguments, f"{TRAINING}min_lr_ratio", f"{TRAINING}lr_power"),
    "warmup_steps": r.by(set_warmup_steps, f"{TRAINING}warmup_steps", f"{TRAINING}warmup_ratio"),
    "optim": r.by(set_optimizer, f"{TRAINING}optim", note=r.OTHER_OPTIMIZER),
    "bf16": r.by(set_bf16, f"{MODEL}dtype"),
    "fp16": r.by(set_fp16, f"{MODEL}dtype"),
    "run_name": r.to("exp_name"),
    "report_to": r.by(set_trackers, "track_with"),
    "project": r.to("tracker_kwargs.trackio_project"),
    "logging_steps": r.steps("logging_steps"),
    "eval_strategy": r.by(set_strategy("eval_strategy"), "eval_strategy", "eval_steps"),
    "evaluation_strategy": r.by(set_strategy("eval_strategy"), "eval_strategy", "eval_steps"),
    "eval_steps": r.by(set_cadence("eval_steps", "eval_strategy", "no"), "eval_steps"),
    "save_strategy": r.by(set_strategy("save_strategy"), "save_strategy"),
    "save_steps": r.by(set_cadence("save_steps", "save_strategy", "steps"), "save_steps"),
    "metric_for_best_model": r.by(set_best_metric, "metric_for_best_model"),
    "greater_is_better": r.only_if(
        lambda run: run.value("metric_for_best_model"), "greater_is_better", "follows from the metric"
    ),
    "resume_from_checkpoint": r.by(set_resume, "resume_from_checkpoint"),
    "dataset_num_proc": r.to(f"{DATA}preprocessing_num_workers"),
    "deepspeed": DEEPSPEED,
    "fsdp": Rule(note="FSDP2 shards the model over the workers of device_mapping"),
    "fsdp_config": r.part_of("fsdp", "actor_train.device_mapping"),
    "neftune_noise_alpha": r.lacks("noise on embeddings is not supported"),
    "train_sampling_strategy": r.lacks(r.SHUFFLED, "random"),
    "group_by_length": r.lacks(f"{r.SHUFFLED}; micro-batches are balanced by length"),
    **r.lack("set actor_train.training_args.optim_args or param_groups", "optim_target_modules optim_args"),
    **r.drop("an incomplete last batch is trained on", "dataloader_drop_last"),
    "push_to_hub": Rule(
        note="a run uploads nothing; `thresher export --push` or DPOTrainer.push_to_hub uploads the model"
    ),
    **r.drop("the best checkpoint is kept; `thresher export --best` writes it", "load_best_model_at_end"),
    **r.drop("a run resumes in its output_dir; set a different one to start again", "overwrite_output_dir"),
    **r.drop("set max_tokens_per_micro_batch if memory runs out", "auto_find_batch_size"),
}
# memory, data loading, communication, logs and evaluation
NEUTRAL = """
accelerator_config average_tokens_across_devices batch_eval_metrics bf16_full_eval dataloader_num_workers dataloader_p*
data_seed dataloader_multiprocessing_context dataloader_in_order ddp_* debug disable_tqdm do_train do_eval do_predict
enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches eval_use_gather_object fp16_full_eval
full_determinism gradient_checkpointing_kwargs hub_* ignore_data_skip include_for_metrics include_num_input_tokens_seen
include_tokens_per_second label_names label_smoothing_factor length_column_name liger_kernel_config local_rank
log_level log_level_replica log_on_each_node logging_strategy logging_first_step logging_nan_inf_filter no_cuda
parallelism_config prediction_loss_only remove_unused_columns restore_callback_states_from_checkpoint
save_on_each_node save_only_model save_safetensors skip_memory_metrics tf32 torch_compile_backend torch_compile_mode
torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id use_cache use_cpu use_liger_kernel
"""
