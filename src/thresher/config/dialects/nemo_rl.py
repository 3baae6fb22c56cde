"""NeMo-RL (`examples/run_dpo.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thresher.config.dialects.engines import MEGATRON_SIZES, set_megatron, use_megatron
from thresher.config.dialects.huggingface import ratio, source_name
from thresher.config.dialects.losses import set_if_positive
from thresher.config.dialects.rules import (
    FILES,
    MODEL,
    TRAINING,
    VALIDATION_FILES,
    Function,
    Rule,
    by,
    drop,
    lack,
    lacks,
    part_of,
    template,
    template_argument,
    to,
    tokenizer,
    track,
)
from thresher.config.dialects.translation import Dialect, Translation, axis
from thresher.config.dialects.trl import if_lora, lora_targets

_LORA = "policy.dtensor_cfg.lora_cfg"
_AXIS = "actor_train.strategy_args.strategy_config"
# built-in data sets; HelpSteer3 has two answers and a score per row
_HUB = {
    "Tulu3Preference": "hf://allenai/llama-3.1-tulu-3-8b-preference-mixture",
    "HelpSteer3": "hf://nvidia/HelpSteer3:{split}:preference",
}


def _is_lora(run: Translation) -> bool:
    return bool(run.get(f"{_LORA}.enabled"))


def _set_average(value: Any, run: Translation) -> None:
    weight = run.get("dpo.preference_loss_weight", 1)
    loss = "sigmoid_norm" if value else "sigmoid"
    run.set("pref_loss", loss if weight == 1 else {loss: float(weight)})


def _set_sft(value: Any, run: Translation) -> None:
    if value and not run.get("dpo.sft_average_log_probs"):
        run.lacks("the summed NLL of the chosen response; rpo_alpha weighs its mean per token")
    else:
        set_if_positive("rpo_alpha")(value, run)


def _set_precision(value: Any, run: Translation) -> None:
    run.set(f"{MODEL}dtype", {"bfloat16": "bf16", "float16": "fp16"}.get(value, "fp32"))


def _set_data(target: str) -> Function:
    def function(value: Any, run: Translation) -> None:
        sets = value if isinstance(value, list) else [value]
        shared = run.get("data.default") or {}
        rows = [{**shared, **each} for each in sets]
        files = [_source(row) for row in rows]
        run.set(target, files[0] if len(files) == 1 else files)
        for row in rows if target == FILES else ():
            kind = row.get("dataset_name")
            for key in ("prompt_key", "chosen_key", "rejected_key"):
                if kind == "BinaryPreferenceDataset" and row.get(key, key.removesuffix("_key")) != key.removesuffix(
                    "_key"
                ):
                    run.set(key, row[key])
            if kind == "HelpSteer3":
                run.lacks("rows have response1, response2 and a score; write prompt, chosen and rejected")

    return function


def _source(row: Mapping[str, Any]) -> str:
    name, split = str(row.get("dataset_name")), row.get("split") or "train"
    if name in _HUB:
        return _HUB[name].format(split=split)
    path = str(row.get("data_path") or name)
    return source_name(path, row.get("split"), row.get("subset"))


def _set_scheduler(value: Any, run: Translation) -> None:
    """Read a chain of torch schedulers: a linear warm-up, then constant, linear or cosine."""
    parts = [(str(part.get("name", "")).rpartition(".")[2], part.get("kwargs", {})) for part in value if "name" in part]
    if len(parts) != 2 or parts[0][0] != "LinearLR":
        return run.lacks("only a linear warm-up followed by one schedule can be expressed")
    (_, warmup), (name, then) = parts
    if name == "ConstantLR":
        run.set(f"{TRAINING}lr_scheduler_type", "constant_with_warmup")
    elif name == "LinearLR" and then.get("end_factor") == 0:
        run.set(f"{TRAINING}lr_scheduler_type", "linear")
    elif name == "CosineAnnealingLR":
        lowest = ratio(then.get("eta_min") or 0.0, run.get("policy.optimizer.kwargs.lr") or 1.0)
        run.set(f"{TRAINING}lr_scheduler_type", "cosine_with_min_lr" if lowest else "cosine")
        if lowest:
            run.set(f"{TRAINING}min_lr_ratio", lowest)
    else:
        return run.lacks(f"there is no schedule {name}")
    run.set(f"{TRAINING}warmup_steps", int(warmup.get("total_iters", 0)))
    if float(warmup.get("start_factor", 0)) > 1e-3:
        run.differs(f"the warm-up starts at 0 here, at {warmup['start_factor']} of the rate there")
    elif name != "ConstantLR":
        run.note("the schedule ends with the run")
    return None


def _set_betas(value: Any, run: Translation) -> None:
    run.set(f"{TRAINING}adam_beta1", value[0])
    run.set(f"{TRAINING}adam_beta2", value[1])


def _set_megatron(value: Any, run: Translation) -> None:
    if not value.get("enabled"):
        return run.ignore("megatron is off")
    optimizer, scheduler = value.get("optimizer", {}), value.get("scheduler", {})
    for key, target in (
        ("lr", "learning_rate"),
        ("weight_decay", "weight_decay"),
        ("adam_beta1", "adam_beta1"),
        ("adam_beta2", "adam_beta2"),
        ("adam_eps", "adam_epsilon"),
    ):
        if key in optimizer:
            run.set(f"{TRAINING}{target}", optimizer[key])
    style = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
    run.set(f"{TRAINING}lr_scheduler_type", style.get(str(scheduler.get("lr_decay_style")), "constant_with_warmup"))
    run.set(f"{TRAINING}warmup_steps", int(scheduler.get("lr_warmup_iters", 0)))
    run.set(f"{TRAINING}gradient_checkpointing", bool(value.get("activation_checkpointing")))
    use_megatron(run)
    sizes = {key: value.get(key) or 1 for key in MEGATRON_SIZES}
    set_megatron(run, {key: size for key, size in sizes.items() if size is True or size > 1})
    if value.get("peft", {}).get("enabled"):
        run.lacks("LoRA of megatron_cfg is not read; set actor_train.model_args.lora_rank")
    return None


def _set_devices(value: Any, run: Translation) -> None:
    count = int(value) * int(run.get("cluster.num_nodes", 1))
    if count == 1:
        return run.ignore("one device")
    devices = f"list(range(0,{count}))"
    run.set("actor_train.device_mapping", devices)
    if not _is_lora(run):
        run.set("reference.device_mapping", devices)
    return None


def _if_tracked(name: str, target: str) -> Function:
    def function(value: Any, run: Translation) -> None:
        if run.get(f"logger.{name}_enabled"):
            run.set(target, value)
        else:
            run.ignore(f"{name} is off")

    return function


def _set_period(target: str) -> Function:
    def function(value: Any, run: Translation) -> None:
        if value and int(value) > 0:
            run.set(target, int(value))
        else:
            run.ignore("off")

    return function


TABLE: dict[str, Rule] = {
    "dpo.preference_average_log_probs": by(_set_average, "pref_loss"),
    "dpo.preference_loss_weight": part_of("dpo.preference_average_log_probs", "pref_loss"),
    "dpo.preference_loss": lacks("only dpo can be translated", "dpo"),
    "dpo.reference_policy_kl_penalty": to("beta"),
    "dpo.sft_loss_weight": by(_set_sft, "rpo_alpha"),
    "dpo.sft_average_log_probs": part_of("dpo.sft_loss_weight", "rpo_alpha"),
    "dpo.seed": to("seed"),
    "dpo.max_num_epochs": to("num_train_epochs"),
    "dpo.max_num_steps": by(_set_period("max_steps"), "max_steps"),
    "dpo.val_period": by(_set_period("eval_steps"), "eval_steps"),
    "dpo.val_at_start": to("eval_on_start"),
    "dpo.val_micro_batch_size": to(f"{TRAINING}per_device_eval_batch_size"),
    **drop(
        "all validation pairs are evaluated, also at the end",
        "dpo.val_batches dpo.val_global_batch_size dpo.val_at_end",
    ),
    "policy.model_name": to("pretrain"),
    "policy.tokenizer.name": tokenizer("policy.model_name"),
    "policy.tokenizer.chat_template": template("default"),
    "policy.tokenizer.chat_template_kwargs": template_argument(),
    "policy.train_global_batch_size": to(f"{TRAINING}global_batch_size"),
    "policy.train_micro_batch_size": to(f"{TRAINING}per_device_train_batch_size"),
    "policy.max_total_sequence_length": to("sequence_length"),
    "policy.precision": by(_set_precision, f"{MODEL}dtype"),
    "policy.max_grad_norm": to(f"{TRAINING}max_grad_norm"),
    f"{_LORA}.enabled": Rule(
        (f"{MODEL}lora_rank",),
        "with `dim`",
        lambda v, run: run.use(f"{MODEL}lora_rank") if v else run.ignore("LoRA is off"),
    ),
    f"{_LORA}.dim": by(if_lora(_is_lora, f"{MODEL}lora_rank"), f"{MODEL}lora_rank"),
    f"{_LORA}.alpha": by(if_lora(_is_lora, f"{MODEL}lora_alpha"), f"{MODEL}lora_alpha"),
    f"{_LORA}.dropout": by(if_lora(_is_lora, f"{MODEL}lora_dropout"), f"{MODEL}lora_dropout"),
    f"{_LORA}.target_modules": by(
        lambda v, run: (
            run.ignore("match_all_linear")
            if not v or run.get(f"{_LORA}.match_all_linear", True)
            else if_lora(_is_lora, f"{MODEL}lora_target", lora_targets)(v, run)
        ),
        f"{MODEL}lora_target",
    ),
    f"{_LORA}.exclude_modules": lacks("name the modules in lora_target"),
    **drop("kernels and placement of LoRA", f"{_LORA}.match_all_linear", f"{_LORA}.use_triton"),
    **drop("LoRA's A is drawn by Kaiming's rule, and B is zero", f"{_LORA}.lora_A_init"),
    **drop("dropout is applied to the input of LoRA's A", f"{_LORA}.dropout_position"),
    "policy.dtensor_cfg.activation_checkpointing": to(f"{TRAINING}gradient_checkpointing"),
    "policy.dtensor_cfg.cpu_offload": to(f"{_AXIS}.cpu_offload"),
    "policy.dtensor_cfg.tensor_parallel_size": axis("tp_size"),
    "policy.dtensor_cfg.context_parallel_size": axis("cp_size"),
    "policy.dtensor_cfg.dp_replicate_size": axis("dp_replicate"),
    **drop(
        "engine and memory; numbers do not change",
        "policy.dtensor_cfg.enabled policy.dtensor_cfg._v2 policy.dtensor_cfg.env_vars "
        "policy.dtensor_cfg.sequence_parallel policy.dtensor_cfg.custom_parallel_plan "
        "policy.dtensor_cfg.clear_cache_every_n_steps policy.dtensor_cfg.automodel_kwargs "
        "policy.dtensor_cfg.expert_parallel_size policy.dtensor_cfg.defer_fsdp_grad_sync "
        "policy.dtensor_cfg.moe_parallelizer policy.dynamic_batching policy.sequence_packing "
        "policy.make_sequence_length_divisible_by policy.offload_optimizer_for_logprob policy.logprob_batch_size "
        "policy.generation policy.refit_buffer_size_gb",
    ),
    "policy.optimizer.name": by(
        lambda v, run: run.ignore("AdamW") if "AdamW" in str(v) else run.lacks("AdamW is the only optimizer"),
        note="AdamW is the only optimizer",
    ),
    "policy.optimizer.kwargs.lr": to(f"{TRAINING}learning_rate"),
    "policy.optimizer.kwargs.weight_decay": to(f"{TRAINING}weight_decay"),
    "policy.optimizer.kwargs.betas": by(_set_betas, f"{TRAINING}adam_beta1", f"{TRAINING}adam_beta2"),
    "policy.optimizer.kwargs.eps": to(f"{TRAINING}adam_epsilon"),
    **drop("kernels of AdamW", "policy.optimizer.kwargs.foreach policy.optimizer.kwargs.fused"),
    "policy.scheduler": by(
        _set_scheduler, f"{TRAINING}lr_scheduler_type", f"{TRAINING}warmup_steps", f"{TRAINING}min_lr_ratio"
    ),
    "policy.megatron_cfg": by(
        _set_megatron, f"{TRAINING}learning_rate", _AXIS, note="optimizer, schedule and axes, if enabled"
    ),
    "data.train": by(_set_data(FILES), FILES, "prompt_key", "chosen_key", "rejected_key"),
    "data.validation": by(_set_data(VALIDATION_FILES), VALIDATION_FILES),
    "data.default": part_of("data.train", FILES),
    "data.val_data_paths": by(lambda v, run: run.set(VALIDATION_FILES, list(v.values())), VALIDATION_FILES),
    "data.shuffle": lacks("pairs are shuffled every epoch", True),
    **drop("data loading; numbers do not change", "data.max_input_seq_length data.num_workers"),
    "checkpointing.checkpoint_dir": to("output_dir"),
    "checkpointing.enabled": by(
        lambda v, run: run.ignore("on") if v else run.set("save_steps", 0),
        "save_steps",
        note="false saves the end only",
    ),
    "checkpointing.save_period": by(_set_period("save_steps"), "save_steps"),
    "checkpointing.keep_top_k": to("save_total_limit", "the newest are kept, and the best one", differs=True),
    **drop("eval/loss selects the best checkpoint", "checkpointing.metric_name checkpointing.higher_is_better"),
    **drop(
        "checkpoints hold the full state",
        "checkpointing.save_optimizer checkpointing.checkpoint_must_save_by checkpointing.save_consolidated "
        "checkpointing.model_save_format",
    ),
    **lack("give the model as policy.model_name", "checkpointing.pretrained_checkpoint"),
    "logger.log_dir": to("logging_dir"),
    "logger.wandb_enabled": by(track("wandb"), "track_with"),
    "logger.tensorboard_enabled": by(track("tensorboard"), "track_with"),
    "logger.mlflow_enabled": by(track("mlflow"), "track_with"),
    "logger.wandb.project": by(_if_tracked("wandb", "tracker_kwargs.wandb_project"), "tracker_kwargs.wandb_project"),
    "logger.wandb.name": by(_if_tracked("wandb", "exp_name"), "exp_name"),
    "logger.wandb.entity": by(_if_tracked("wandb", "tracker_kwargs.wandb_entity"), "tracker_kwargs.wandb_entity"),
    "logger.mlflow.tracking_uri": by(
        _if_tracked("mlflow", "tracker_kwargs.mlflow_tracking_uri"), "tracker_kwargs.mlflow_tracking_uri"
    ),
    **drop(
        "trackers have no such setting; metrics.jsonl is always written",
        "logger.swanlab_enabled logger.swanlab logger.tensorboard logger.mlflow.experiment_name "
        "logger.mlflow.run_name logger.monitor_gpus logger.gpu_monitoring logger.num_val_samples_to_print",
    ),
    "cluster.gpus_per_node": by(_set_devices, "actor_train.device_mapping", "reference.device_mapping"),
    "cluster.num_nodes": part_of("cluster.gpus_per_node", "actor_train.device_mapping"),
    **drop("placement; numbers do not change", "cluster.segment_size"),
}


def _defaults(_given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "dpo.preference_average_log_probs": False,
        "dpo.reference_policy_kl_penalty": 0.05,
        "dpo.max_num_steps": 150,
        "dpo.max_num_epochs": 1,
    }


NEMO_RL = Dialect(
    name="nemo-rl",
    title="NeMo-RL",
    table=TABLE,
    defaults=_defaults,
    marks=(frozenset({"policy", "dpo"}),),
    programs=("run_dpo.py",),
)
