"""NeMo-RL (`examples/run_dpo.py` and `run_rm.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thresher.importers import mixtures
from thresher.importers import rules as r
from thresher.importers.engines import MEGATRON_SIZES, set_megatron, use_megatron
from thresher.importers.translation import ENGINE, EVAL_FILES, FILES, MODEL, SETS, TRAINING, Rule, Translation

_LORA = "policy.dtensor_cfg.lora_cfg"
# built-in datasets; HelpSteer3 has two answers and a score per row
_HUB = {
    "Tulu3Preference": "hf://allenai/llama-3.1-tulu-3-8b-preference-mixture",
    "HelpSteer3": "hf://nvidia/HelpSteer3:{split}:preference",
}
_SIZES = {
    "tensor_parallel_size": "tp_size",
    "context_parallel_size": "cp_size",
    "expert_parallel_size": "ep_size",
    "dp_replicate_size": "dp_replicate",
}
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def _is_lora(run: Translation) -> bool:
    return bool(run.get(f"{_LORA}.enabled"))


def _set_average(value: Any, run: Translation) -> None:
    weight = run.get("dpo.preference_loss_weight", 1)
    loss = "sigmoid_norm" if value else "sigmoid"
    run.set("pref_loss", loss if weight == 1 else {loss: float(weight)})


def _set_sft(value: Any, run: Translation) -> None:
    if run.get("dpo.sft_average_log_probs"):
        run.set("rpo_alpha", value)
    else:
        run.lacks("the summed NLL of the chosen response; rpo_alpha weighs its mean per token")


def _set_data(target: str) -> r.Function:
    def function(_: Any, run: Translation) -> None:
        datasets, others = _datasets("data.train", run), _validation(run)
        if target == EVAL_FILES:
            datasets, others = others, datasets
            if run.get("data.val_data_paths") and run.entries[-1].key == "data.validation":
                return run.ignore("data.val_data_paths takes precedence")
        mixtures.set_datasets(run, target, datasets, others, is_named=len(datasets) > 1 and bool(datasets[0].name))
        if target == FILES and any(
            file.startswith("hf://nvidia/HelpSteer3") for each in datasets for file in each.files
        ):
            run.lacks("rows have response1, response2 and a score; write prompt, chosen and rejected")
        return None

    return function


def _validation(run: Translation) -> list[mixtures.Dataset]:
    paths = run.get("data.val_data_paths") or {}
    named = [mixtures.Dataset([r.source_name(path)], name, {}) for name, path in paths.items()]
    return named or _datasets("data.validation", run)


def _datasets(key: str, run: Translation) -> list[mixtures.Dataset]:
    value, shared = run.get(key), run.get("data.default") or {}
    rows = [{**shared, **each} for each in (value if isinstance(value, list) else [value] if value else [])]
    return [mixtures.Dataset([_source(row)], columns=_columns(row)) for row in rows]


def _columns(row: Mapping[str, Any]) -> dict[str, str]:
    names = ("prompt", "chosen", "rejected") if row.get("dataset_name") == "BinaryPreferenceDataset" else ()
    return {name: row[f"{name}_key"] for name in names if row.get(f"{name}_key", name) != name}


def _set_best_metric(value: Any, run: Translation) -> None:
    """Read val:validation-SET_loss; a single set has no name here, and is called `default` there."""
    name = str(value).removeprefix("val:validation-").removesuffix("_loss")
    if name in (run.value(SETS) or {}) and str(value) == f"val:validation-{name}_loss":
        run.set("metric_for_best_model", f"eval/{name}/loss")
    else:
        run.drop("eval/loss selects the best checkpoint")


def _source(row: Mapping[str, Any]) -> str:
    name, split = str(row.get("dataset_name")), row.get("split") or "train"
    if name in _HUB:
        return _HUB[name].format(split=split)
    path = str(row.get("data_path") or name)
    return r.source_name(path, row.get("split"), row.get("subset"))


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
        lowest = r.ratio(then.get("eta_min") or 0.0, run.get("policy.optimizer.kwargs.lr") or 1.0)
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
    for key in ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"):
        if key in optimizer:
            ours = {"lr": "learning_rate", "adam_eps": "adam_epsilon"}.get(key, key)
            run.set(f"{TRAINING}{ours}", optimizer[key])
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


def _if_tracked(name: str, target: str) -> Rule:
    return r.only_if(lambda run: run.get(f"logger.{name}_enabled"), target, f"{name} is off")


# keys of both algorithms
_ALGORITHM: r.Table = {
    "seed": r.to("seed"),
    "max_num_epochs": r.to("num_train_epochs"),
    "max_num_steps": r.positive("max_steps"),
    "val_period": r.positive("eval_steps"),
    "val_at_start": r.to("eval_on_start"),
    "val_micro_batch_size": r.to(f"{TRAINING}per_device_eval_batch_size"),
}
TABLE: r.Table = {
    "dpo.preference_average_log_probs": r.by(_set_average, "pref_loss"),
    "dpo.preference_loss_weight": r.part_of("dpo.preference_average_log_probs", "pref_loss"),
    "dpo.preference_loss": r.lacks("only dpo can be translated", "dpo"),
    "dpo.reference_policy_kl_penalty": r.to("beta"),
    "dpo.sft_loss_weight": r.by(_set_sft, "rpo_alpha", off="off"),
    "dpo.sft_average_log_probs": r.part_of("dpo.sft_loss_weight", "rpo_alpha"),
    "policy.reward_model_cfg.enabled": r.REWARDS,
    "policy.reward_model_cfg.reward_model_type": r.lacks(
        "the loss of a reward model is bradley_terry", "bradley_terry"
    ),
    **{f"{section}.{key}": rule for section in ("dpo", "rm") for key, rule in _ALGORITHM.items()},
    "policy.model_name": r.to("pretrain"),
    "policy.tokenizer.name": r.tokenizer("policy.model_name"),
    "policy.tokenizer.chat_template": r.template("default"),
    "policy.tokenizer.chat_template_kwargs": r.template_argument(),
    "policy.train_global_batch_size": r.to(f"{TRAINING}global_batch_size"),
    "policy.train_micro_batch_size": r.to(f"{TRAINING}per_device_train_batch_size"),
    "policy.max_total_sequence_length": r.to("sequence_length"),
    "policy.precision": r.converted(f"{MODEL}dtype", lambda value: _PRECISIONS.get(value, "fp32")),
    "policy.max_grad_norm": r.to(f"{TRAINING}max_grad_norm"),
    f"{_LORA}.enabled": r.lora_switch("read with `dim`"),
    **r.lora_rules(
        _is_lora,
        f"{_LORA}.dim",
        alpha=f"{_LORA}.alpha",
        dropout=f"{_LORA}.dropout",
        exclude=f"{_LORA}.exclude_modules",
    ),
    f"{_LORA}.target_modules": r.only_if(
        lambda run: _is_lora(run) and run.entries[-1].value and not run.get(f"{_LORA}.match_all_linear", True),
        f"{MODEL}lora_target",
        "LoRA is off, or on all linear modules",
        r.lora_targets,
    ),
    **r.drop("LoRA's A is drawn by Kaiming's rule, and B is zero", f"{_LORA}.lora_A_init"),
    **r.drop("dropout is applied to the input of LoRA's A", f"{_LORA}.dropout_position"),
    "policy.dtensor_cfg.activation_checkpointing": r.to(f"{TRAINING}gradient_checkpointing"),
    "policy.dtensor_cfg.cpu_offload": r.to(f"{ENGINE}cpu_offload"),
    **{f"policy.dtensor_cfg.{theirs}": r.size(ours) for theirs, ours in _SIZES.items()},
    "policy.optimizer.name": r.by(
        lambda value, run: run.ignore("AdamW") if "AdamW" in str(value) else run.lacks(r.OTHER_OPTIMIZER),
        note=r.OTHER_OPTIMIZER,
    ),
    "policy.optimizer.kwargs.lr": r.to(f"{TRAINING}learning_rate"),
    "policy.optimizer.kwargs.weight_decay": r.to(f"{TRAINING}weight_decay"),
    "policy.optimizer.kwargs.betas": r.by(_set_betas, f"{TRAINING}adam_beta1", f"{TRAINING}adam_beta2"),
    "policy.optimizer.kwargs.eps": r.to(f"{TRAINING}adam_epsilon"),
    "policy.scheduler": r.by(
        _set_scheduler, f"{TRAINING}lr_scheduler_type", f"{TRAINING}warmup_steps", f"{TRAINING}min_lr_ratio"
    ),
    "policy.megatron_cfg": r.by(
        _set_megatron,
        f"{TRAINING}learning_rate",
        ENGINE.removesuffix("."),
        note="optimizer, schedule and parallel sizes, if enabled",
    ),
    "data.train": r.by(_set_data(FILES), *mixtures.TRAINING_DATA),
    **dict.fromkeys(("data.validation", "data.val_data_paths"), r.by(_set_data(EVAL_FILES), *mixtures.EVALUATION_DATA)),
    "data.default": r.part_of("data.train", FILES),
    "data.shuffle": r.lacks(r.SHUFFLED, True),
    "checkpointing.checkpoint_dir": r.to("output_dir"),
    "checkpointing.enabled": r.by(
        lambda v, run: run.ignore("on") if v else run.set("save_steps", 0),
        "save_steps",
        note="false saves the end only",
    ),
    "checkpointing.save_period": r.positive("save_steps"),
    "checkpointing.keep_top_k": r.to("save_total_limit", "the newest are kept, and the best one", differs=True),
    "checkpointing.metric_name": r.by(_set_best_metric, "metric_for_best_model"),
    **r.drop("follows from the metric", "checkpointing.higher_is_better"),
    "checkpointing.pretrained_checkpoint": r.lacks("give the model as policy.model_name"),
    "logger.log_dir": r.to("logging_dir"),
    **{f"logger.{name}_enabled": r.track(name) for name in ("wandb", "tensorboard", "mlflow")},
    "logger.wandb.name": _if_tracked("wandb", "exp_name"),
    **{f"logger.wandb.{name}": _if_tracked("wandb", f"tracker_kwargs.wandb_{name}") for name in ("project", "entity")},
    "logger.mlflow.tracking_uri": _if_tracked("mlflow", "tracker_kwargs.mlflow_tracking_uri"),
    "cluster.gpus_per_node": r.by(_set_devices, "actor_train.device_mapping", "reference.device_mapping"),
    "cluster.num_nodes": r.part_of("cluster.gpus_per_node", "actor_train.device_mapping"),
}
# validation, engine, memory, kernels, data loading, checkpoint formats and trackers
NEUTRAL = """
checkpointing.checkpoint_must_save_by checkpointing.model_save_format checkpointing.save_consolidated
checkpointing.save_optimizer cluster.segment_size data.max_input_seq_length data.num_workers dpo.val_at_end
dpo.val_batches dpo.val_global_batch_size logger.gpu_monitoring* logger.mlflow.experiment_name logger.mlflow.run_name
logger.monitor_gpus logger.num_val_samples_to_print logger.swanlab* logger.tensorboard logger.tensorboard.*
policy.dtensor_cfg._v2 policy.dtensor_cfg.automodel_kwargs* policy.dtensor_cfg.clear_cache_every_n_steps
policy.dtensor_cfg.custom_parallel_plan policy.dtensor_cfg.defer_fsdp_grad_sync policy.dtensor_cfg.enabled
policy.dtensor_cfg.env_vars* policy.dtensor_cfg.lora_cfg.match_all_linear
policy.dtensor_cfg.lora_cfg.use_triton policy.dtensor_cfg.moe_parallelizer* policy.dtensor_cfg.sequence_parallel
policy.dynamic_batching* policy.generation* policy.logprob_batch_size policy.make_sequence_length_divisible_by
policy.offload_optimizer_for_logprob policy.optimizer.kwargs.foreach policy.optimizer.kwargs.fused
policy.refit_buffer_size_gb policy.sequence_packing* rm.val_batches rm.val_global_batch_size
"""


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("policy.reward_model_cfg.enabled"):
        return {"rm.max_num_epochs": 1}
    return {
        "dpo.preference_average_log_probs": False,
        "dpo.reference_policy_kl_penalty": 0.05,
        "dpo.max_num_steps": 150,
        "dpo.max_num_epochs": 1,
    }
