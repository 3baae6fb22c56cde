"""axolotl (`rl: dpo`, `ipo`, `simpo`, `orpo`, `kto`, and `reward_model`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thresher.importers import huggingface, mixtures
from thresher.importers import rules as r
from thresher.importers.huggingface import set_optimizer, set_schedule, set_weight_dtype
from thresher.importers.translation import DATA, EVAL_FILES, EVAL_SPLIT, FILES, MODEL, TRAINING, Rule, Translation

_REWARD_ROWS = "bradley_terry.chat_template"
# columns of the row formats that are not named prompt, chosen and rejected
_COLUMNS = {
    "intel": {"prompt": "question"},
    "icr": {"prompt": "input"},
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
    _REWARD_ROWS: {"prompt": "input"},
}


def _is_lora(run: Translation) -> bool:
    return run.get("adapter") in ("lora", "qlora")


def _set_method(value: Any, run: Translation) -> None:
    if value in ("dpo", "ipo", "simpo", "orpo"):
        run.set("pref_loss", "sigmoid" if value == "dpo" else value)
    elif value == "kto":
        r.set_method("kto", run)
    else:
        run.lacks(r.OTHER_METHOD)


def _set_datasets(target: str) -> r.Function:
    def function(_: Any, run: Translation) -> None:
        keys = ("datasets", "test_datasets") if target == FILES else ("test_datasets", "datasets")
        datasets, others = ([_dataset(each, run) for each in _entries(run.get(key))] for key in keys)
        mixtures.set_datasets(run, target, datasets, others)
        if not {_style(each) for each in _entries(run.get(keys[0]))} <= {"", *r.TEMPLATES}:
            run.lacks(r.NAMED_TEMPLATE)

    return function


def _entries(value: Any) -> list[Mapping[str, Any]]:
    return value if isinstance(value, list) else [value] if value else []


def _dataset(each: Mapping[str, Any], run: Translation) -> mixtures.Dataset:
    configs: Any = each.get("name")
    at = each.get("data_files"), each.get("split")
    files = [
        file
        for config in (configs if isinstance(configs, list) else [configs])
        for file in mixtures.named_files(str(each.get("path")), *at, config, each.get("revision"))
    ]
    # only reward models are trained on one of several shards
    shards = int(each.get("shards") or 1) if run.get("reward_model") else 1
    return mixtures.Dataset(files, columns=_columns(each), template=r.TEMPLATES.get(_style(each)), weight=1 / shards)


def _style(each: Mapping[str, Any]) -> str:
    """Return the template in the type of the rows, such as chatml.intel, or under a dataset's own key."""
    kind = str(each.get("type") or "")
    style = "" if kind == _REWARD_ROWS else kind.partition(".")[0]
    if style == "chat_template":
        style = str(each.get("chat_template") or "")
    return "" if style.startswith("tokenizer_default") else style


def _columns(each: Mapping[str, Any]) -> dict[str, str]:
    kind = each.get("type") or ""
    if isinstance(kind, Mapping):
        fields: Mapping[str, Any] = kind
        columns = {"prompt": fields.get("field_prompt")}
    else:
        fields = each
        named = _COLUMNS.get(kind) or _COLUMNS.get(kind.partition(".")[2], {})
        columns = {"prompt": each.get("field_messages"), **named}
    columns |= {key: fields[f"field_{key}"] for key in ("chosen", "rejected") if fields.get(f"field_{key}")}
    return {key: column for key, column in columns.items() if column and column != key}


def _set_length(value: Any, run: Translation) -> None:
    how = run.get("excess_length_strategy", "drop")
    run.set("sequence_length", value)
    if how == "truncate" or run.get("reward_model"):  # whose rows are cut in any case
        run.set(f"{DATA}truncation", "response_end")
    elif how == "raise":
        run.differs("long pairs are dropped and reported, not an error")


def _set_linear(_: Any, run: Translation) -> None:
    if _is_lora(run):
        run.set(f"{MODEL}lora_target", ["all-linear"])
    else:
        run.ignore("LoRA is off")


def _set_rates(value: Any, run: Translation) -> None:
    # names of modules are found anywhere in a parameter's name
    groups = [{"match": [f"*{name}*" for name in group["modules"]], "lr": group["lr"]} for group in value]
    run.set(f"{TRAINING}param_groups", [*groups, *(run.value(f"{TRAINING}param_groups") or [])])


def _set_embedding_rate(value: Any, run: Translation) -> None:
    name = "lr" if run.entries[-1].key == "embedding_lr" else "lr_ratio"
    if name == "lr_ratio" and run.get("embedding_lr"):
        return run.ignore("embedding_lr is set")
    group = {"match": ["embed_tokens", "lm_head"], name: value}
    run.set(f"{TRAINING}param_groups", [*(run.value(f"{TRAINING}param_groups") or []), group])
    return run.note("if embedding and head are tied, remove lm_head from the group")


def _set_special_tokens(value: Any, run: Translation) -> None:
    tokens = {name: token for name, token in value.items() if token is not None}
    if pad := tokens.pop("pad_token", None):
        run.set(f"{MODEL}pad_token", pad)
    if tokens:
        run.lacks(f"{', '.join(tokens)} of the tokenizer cannot be replaced; change its files")


def _set_min_ratio(value: Any, run: Translation) -> None:
    run.set(f"{TRAINING}lr_scheduler_type", "cosine_with_min_lr")
    run.set(f"{TRAINING}min_lr_ratio", value)


def _times_per_epoch(target: str) -> Rule:
    """Read a number of evaluations or checkpoints per epoch: once per epoch here."""

    def function(value: Any, run: Translation) -> None:
        run.set(target, "epoch")
        if value != 1:
            run.differs(f"once per epoch here; set {target.replace('strategy', 'steps')} for more")

    return r.by(function, target)


def _set_wandb_project(value: Any, run: Translation) -> None:
    run.set("tracker_kwargs.wandb_project", value)
    if "wandb" not in (run.value("track_with") or []):
        run.set("track_with", [*(run.value("track_with") or ["console"]), "wandb"])


def _set_precision(value: Any, run: Translation) -> None:
    """axolotl loads the weights in the dtype that it computes in."""
    huggingface.set_bf16(value, run)
    if value in (True, "auto", "full"):
        set_weight_dtype(lambda run: not _is_lora(run))("bfloat16", run)
        run.entries[-1].outcome = "translated"


def _set_float16(value: Any, run: Translation) -> None:
    huggingface.set_fp16(value, run)
    if value is True:
        run.differs("master weights are fp32 here")


_OWN: r.Table = {
    "base_model": r.to("pretrain"),
    "rl": r.by(_set_method, "pref_loss", note="dpo, ipo, simpo, orpo and kto; others have no equivalent"),
    "kto_desirable_weight": r.if_loss("desirable_weight", "kto"),
    "kto_undesirable_weight": r.if_loss("undesirable_weight", "kto"),
    "dpo_loss_type": r.losses("dpo_loss_weights", "dpo_label_smoothing"),
    "dpo_loss_weights": r.part_of("dpo_loss_type", "pref_loss"),
    "reward_model": r.REWARDS,
    "center_rewards_coefficient": r.if_loss("center_rewards_coefficient", "bradley_terry"),
    **dict.fromkeys(("rl_beta", "dpo_beta", "trl.beta"), r.to("beta")),
    "orpo_alpha": r.if_loss("beta", "orpo"),
    "simpo_gamma": r.if_loss("gamma", "simpo"),
    "cpo_alpha": r.CPO_ALPHA,
    "rpo_alpha": r.switch("rpo_alpha"),
    "dpo_label_smoothing": r.LABEL_SMOOTHING,
    "dpo_use_weighting": r.to("use_wpo"),
    "dpo_generate_during_eval": r.SAMPLES,
    "dpo_norm_loss": r.lacks("use pref_loss: sigmoid_norm"),
    "precompute_ref_log_probs": r.switch("reference.mode", "precompute", off="the mode does not change numbers"),
    "adapter": r.by(lambda _, run: run.use(f"{MODEL}lora_rank"), f"{MODEL}lora_rank", note="lora or qlora"),
    **r.lora_rules(
        _is_lora,
        "lora_r",
        rslora="peft_use_rslora",
        dora="peft_use_dora",
        rank_pattern="lora_rank_pattern",
        alpha_pattern="lora_alpha_pattern",
    ),
    "lora_target_linear": r.by(_set_linear, f"{MODEL}lora_target", off="off"),
    "lora_target_modules": r.only_if(
        lambda run: _is_lora(run) and not run.get("lora_target_linear"),
        f"{MODEL}lora_target",
        "LoRA is off, or lora_target_linear includes them",
        r.lora_targets,
    ),
    "lora_modules_to_save": r.modules_to_save(_is_lora),
    "lora_model_dir": r.ADAPTER,
    "peft_init_lora_weights": r.LORA_INIT,
    **r.quantization(
        _is_lora,
        {"load_in_4bit": 4, "load_in_8bit": 8},
        "bnb_config_kwargs.bnb_4bit_quant_type",
        "bnb_config_kwargs.bnb_4bit_use_double_quant",
        is_double=True,
    ),
    **r.lack(r.QUANTIZED, "gptq quantization model_quantization_config quantize_moe_experts"),
    "datasets": r.by(_set_datasets(FILES), *mixtures.TRAINING_DATA),
    "test_datasets": r.by(_set_datasets(EVAL_FILES), *mixtures.EVALUATION_DATA),
    "val_set_size": r.by(r.set_split, EVAL_SPLIT),
    "chat_template": r.template("tokenizer_default"),
    "chat_template_jinja": r.lacks(r.WRITE_TEMPLATE),
    "chat_template_kwargs": r.template_argument(),
    "default_system_message": r.to(f"{DATA}system_prompt"),
    "sequence_len": r.by(_set_length, "sequence_length"),
    "excess_length_strategy": r.part_of("sequence_len", f"{DATA}truncation"),
    **dict.fromkeys(("dataset_processes", "dataset_num_proc"), r.to(f"{DATA}preprocessing_num_workers")),
    "micro_batch_size": r.to(f"{TRAINING}per_device_train_batch_size"),
    **r.kept(TRAINING, "gradient_accumulation_steps"),
    "eval_batch_size": r.to(f"{TRAINING}per_device_eval_batch_size"),
    "num_epochs": r.to("num_train_epochs"),
    "optimizer": r.by(set_optimizer, f"{TRAINING}optim", note=r.OTHER_OPTIMIZER),
    "lr_scheduler": r.by(set_schedule, f"{TRAINING}lr_scheduler_type"),
    "cosine_min_lr_ratio": r.by(_set_min_ratio, f"{TRAINING}lr_scheduler_type", f"{TRAINING}min_lr_ratio"),
    **dict.fromkeys(("bf16", "bfloat16"), r.by(_set_precision, f"{MODEL}dtype", f"{MODEL}master_dtype")),
    "float16": r.by(_set_float16, f"{MODEL}dtype"),
    "float32": r.switch(f"{MODEL}dtype", "fp32"),
    "flash_attention": r.switch(f"{MODEL}attn_implementation", "flash_attention_2"),
    "sdp_attention": r.switch(f"{MODEL}attn_implementation", "sdpa"),
    "eager_attention": r.switch(f"{MODEL}attn_implementation", "eager"),
    **r.kept(MODEL, "attn_implementation trust_remote_code"),
    "revision_of_model": r.to(f"{MODEL}revision", neutral=("main",)),
    "special_tokens": r.by(_set_special_tokens, f"{MODEL}pad_token"),
    "tokenizer_config": r.tokenizer("base_model"),
    "tensor_parallel_size": r.size("tp_size"),
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_degree"), r.size("cp_size")),
    "dp_replicate_size": r.size("dp_replicate"),
    **{f"use_{name}": r.track(name) for name in huggingface.TRACKERS},
    "wandb_project": r.by(_set_wandb_project, "tracker_kwargs.wandb_project", "track_with"),
    **r.kept("tracker_kwargs.", "wandb_entity mlflow_tracking_uri"),
    "wandb_name": r.to("exp_name"),
    "wandb_mode": r.choice(
        "tracker_kwargs.wandb_mode", {name: name for name in ("online", "offline")}, ignore="auto, online or offline"
    ),
    **{f"{what}_steps": r.converted(f"{what}_steps", int) for what in ("eval", "save")},
    **{f"{what}s_per_epoch": _times_per_epoch(f"{what}_strategy") for what in ("eval", "save")},
    "early_stopping_patience": r.lacks("a run ends after max_steps or num_train_epochs"),
    "loraplus_lr_ratio": r.lora_plus(_is_lora),
    "lr_groups": r.by(_set_rates, f"{TRAINING}param_groups", off="one learning rate"),
    **dict.fromkeys(
        ("embedding_lr", "embedding_lr_scale"),
        r.by(_set_embedding_rate, f"{TRAINING}param_groups", off="one learning rate"),
    ),
    "unfrozen_parameters": r.lacks(r.FROZEN),
    "dataset_exact_deduplication": r.lacks("repeated pairs are reported and kept; remove them from the file"),
    "shuffle_merged_datasets": r.lacks(r.SHUFFLED, True),
    **r.lack(
        r.VOCABULARY, "tokens added_tokens_overrides resize_token_embeddings_to_32x eot_tokens fix_untrained_tokens"
    ),
    **r.lack(
        "the model's config cannot be changed",
        "overrides_of_model_config overrides_of_model_kwargs rope_scaling reinit_weights relora qat fp8 "
        "s2_attention scaling_softmax shrink_embeddings use_pose use_onebitllms",
    ),
    **r.lack(
        "adapters are the same in every layer",
        "peft_layers_to_transform peft_layers_pattern peft_layer_replication peft_trainable_token_indices",
    ),
    "lora_target_parameters": r.lacks("name them in lora_target, with the modules"),
    **r.lack(r.OTHER_OPTIMIZER, "adam_beta3 adam_epsilon2 jagged_restart_steps lisa_n_layers"),
    **r.lack("there is no such schedule", "cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor"),
    **r.lack(r.OTHER_METHOD, "process_reward_model use_eaft trainer_cls"),
    **r.lack("the rows of a file cannot be chosen", "dataset_shard_num min_sample_len curriculum_sampling"),
    "noisy_embedding_alpha": r.lacks("noise on embeddings is not supported"),
    **r.drop("plugins are not run; those with kernels change numbers by rounding only", "plugins"),
    **r.drop("a run stops after max_consecutive_skipped_steps", "loss_watchdog_threshold loss_watchdog_patience"),
    **r.drop("set actor_train.device_mapping", "use_ray ray_num_workers world_size"),
}
# what axolotl finds by itself, kernels, packing, memory, trackers, caches, generation, pretraining and other methods
NEUTRAL = f"""{huggingface.NEUTRAL}
activation_offloading auto_resume_from_checkpoints axolotl_config_path base_model_config batch_flattening batch_size
bench_* bnb_config_kwargs.bnb_4bit_compute_dtype bnb_config_kwargs.bnb_4bit_quant_storage chunked_cross_entropy*
cls_model_config comet_*
dataset_keep_in_memory dataset_prepared_path dataset_shard_idx ddp deepcompile device device_map dion_* do_bench_eval
do_causal_lm_eval dp_shard_size dpo_padding_free dpo_use_liger_kernel dpo_use_logits_to_keep dynamic_checkpoint eaft_*
ebft ebft.* embeddings_skip_upcast eval_causal_lm_metrics eval_max_new_tokens eval_sample_packing eval_sequence_len
eval_table_size experimental_skip_move_to_device experts_implementation flash_attn_* flash_optimum flex_attention
flex_attn_compile_kwargs fp32_norm* fp8_* freeze_mm_modules fsdp_final_state_dict_type fsdp_version fused_attn_kernel
gc_collect_steps gc_steps gemma4_hybrid_attn_impl generate_samples generation_* gpu_memory_limit gradio_*
heads_k_stride hf_mlflow_log_artifacts hf_use_auth_token include_tkps is_*_derived_model is_preprocess jagged_restart_*
large_head_attention layer_offloading liger_* lisa_*
llama4_linearized_experts lora_*_kernel lora_fan_in_fan_out lora_on_cpu loraplus_lr_embedding low_cpu_mem_usage
max_memory max_packed_sequence_len max_prompt_len mean_resizing_embeddings merge_* mlflow_experiment_name
mlflow_run_name model_quantization_config_kwargs model_type multipack_* num_dataset_shards_to_save
num_generation_samples num_labels otel_metrics_* pad_to_multiple_of pad_to_sequence_len peft
peft_autocast_adapter_dtype peft_ensure_weight_tying pose_* preprocess_iterable pretrain_* pretraining_* processor_*
profiler_* push_dataset_to_hub qgalore_* qlora_sharded_model_loading ray_run_name relora_* resources_per_worker
ring_attn_func sage_attention sample_packing sample_packing_* save_first_step scaling_softmax_* sdpa_varlen
selective_checkpointing shuffle_before_merging_datasets skip_prepare_dataset streaming* strict swanlab_* tiled_mlp*
tokenizer_legacy tokenizer_save_jinja_files tokenizer_type tokenizer_use_* torch_compile_options torchdistx_path
total_num_tokens total_supervised_tokens train_on_inputs trl.* type_of_model use_comet use_kernels use_otel_metrics
use_swanlab vllm vllm.* wandb_log_model wandb_run_id wandb_watch xformers_attention
"""
_SHARED = {key: rule for key, rule in huggingface.TABLE.items() if key not in ("num_train_epochs", "optim", "run_name")}
TABLE: r.Table = {**_OWN, **_SHARED, **_OWN}


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    simpo = {"simpo_gamma": 0.5, "cpo_alpha": 1.0} if given.get("rl") == "simpo" else {}
    cadences = {
        f"{what}_strategy": "epoch"
        for what in ("eval", "save")
        if not given.keys() & {f"{what}_strategy", f"{what}_steps", f"{what}s_per_epoch"}
    }
    beta = {} if given.keys() & {"rl_beta", "dpo_beta", "trl.beta", "orpo_alpha"} else {"rl_beta": 0.1}
    warmup = {} if given.keys() & {"warmup_steps", "warmup_ratio"} else {"warmup_ratio": 0.03}
    precision = {} if any(given.get(key) for key in ("fp16", "float16", "float32")) else {"bf16": "auto"}
    sizes = {"sequence_len": 512, "micro_batch_size": 1, "num_epochs": 1.0, "save_total_limit": 4}
    return {**beta, **simpo, **warmup, **cadences, **sizes, **precision}
