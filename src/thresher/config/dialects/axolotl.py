"""axolotl (`rl: dpo`, `ipo`, `simpo`, `orpo`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thresher.config.dialects import huggingface
from thresher.config.dialects.huggingface import set_optimizer, set_schedule, set_weight_dtype, source_name
from thresher.config.dialects.losses import set_if_loss, set_if_positive, set_label_smoothing, set_losses
from thresher.config.dialects.rules import (
    DATA,
    FILES,
    MODEL,
    TEMPLATES,
    TRAINING,
    VALIDATION_FILES,
    VALIDATION_SPLIT,
    Function,
    Rule,
    adapter,
    by,
    drop,
    lack,
    lacks,
    lora_init,
    part_of,
    planned,
    samples,
    set_split,
    template,
    template_argument,
    to,
    tokenizer,
    track,
)
from thresher.config.dialects.translation import Dialect, Translation, axis
from thresher.config.dialects.trl import if_lora, lora_alpha, lora_targets

# columns of the row formats that are not named prompt, chosen and rejected
_COLUMNS = {
    "intel": {"prompt": "question"},
    "icr": {"prompt": "input"},
    "argilla": {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
}


def _is_lora(run: Translation) -> bool:
    return run.get("adapter") in ("lora", "qlora")


def _set_method(value: Any, run: Translation) -> None:
    if value in ("ipo", "simpo", "orpo"):
        run.set("pref_loss", value)
    elif value == "dpo":
        run.set("pref_loss", "sigmoid")
    elif value == "kto":
        run.plan("kto", "kto")
    else:
        run.lacks("this is not preference training")


def _set_datasets(target: str) -> Any:
    def function(value: Any, run: Translation) -> None:
        sets = value if isinstance(value, list) else [value]
        names = [_source(each) for each in sets]
        run.set(target, names[0] if len(names) == 1 else names)
        if target != FILES:
            return
        columns = [_columns(each) for each in sets]
        for key, column in columns[0].items() if columns else ():
            run.set(f"{key}_key", column)
        if any(each != columns[0] for each in columns):
            run.lacks("chosen_key, rejected_key and prompt_key hold for all files; give the files the same columns")
        styles = {str(each.get("type", "")).partition(".")[0] for each in sets} - {"", "chat_template"}
        for style in styles:
            if style in TEMPLATES:
                run.set(f"{DATA}template", TEMPLATES[style])
            else:
                run.plan("named_template", style)

    return function


def _source(each: Mapping[str, Any]) -> str:
    files = each.get("data_files")
    if files:
        return str(files[0] if isinstance(files, list) else files)
    return source_name(str(each.get("path")), each.get("split"), each.get("name"))


def _columns(each: Mapping[str, Any]) -> dict[str, str]:
    kind = each.get("type", "")
    if isinstance(kind, Mapping):
        fields: Mapping[str, Any] = kind
        columns = {"prompt": fields.get("field_prompt")}
    else:
        fields = each
        columns = {"prompt": each.get("field_messages"), **_COLUMNS.get(str(kind).partition(".")[2], {})}
    columns |= {key: fields[f"field_{key}"] for key in ("chosen", "rejected") if fields.get(f"field_{key}")}
    return {key: column for key, column in columns.items() if column and column != key}


def _set_length(value: Any, run: Translation) -> None:
    how = run.get("excess_length_strategy", "drop")
    run.set("sequence_length", value)
    if how == "truncate":
        run.set(f"{DATA}truncation", "response_end")
    elif how == "raise":
        run.differs("long pairs are dropped and reported, not an error")


def _set_linear(value: Any, run: Translation) -> None:
    if not _is_lora(run):
        run.ignore("LoRA is off")
    elif value:
        run.set(f"{MODEL}lora_target", ["all-linear"])
    else:
        run.ignore("off")


def _set_modules(value: Any, run: Translation) -> None:
    if run.get("lora_target_linear"):
        run.ignore("lora_target_linear includes them")
    else:
        if_lora(_is_lora, f"{MODEL}lora_target", lora_targets)(value, run)


def _set_special_tokens(value: Any, run: Translation) -> None:
    tokens = {name: token for name, token in value.items() if token is not None}
    if pad := tokens.pop("pad_token", None):
        run.set(f"{MODEL}pad_token", pad)
    if tokens:
        run.lacks(f"{', '.join(tokens)} of the tokenizer cannot be replaced; change its files")


def _set_min_ratio(value: Any, run: Translation) -> None:
    run.set(f"{TRAINING}lr_scheduler_type", "cosine_with_min_lr")
    run.set(f"{TRAINING}min_lr_ratio", value)


def _set_attention(name: str) -> Any:
    def function(value: Any, run: Translation) -> None:
        if value:
            run.set(f"{MODEL}attn_implementation", name)
        else:
            run.ignore("off")

    return function


def _set_times_per_epoch(target: str) -> Function:
    """Make a function that reads a number of evaluations or checkpoints per epoch: once per epoch here."""

    def function(value: Any, run: Translation) -> None:
        run.set(target, "epoch")
        if value != 1:
            run.differs(f"once per epoch here; set {target.replace('strategy', 'steps')} for more")

    return function


def _set_wandb_project(value: Any, run: Translation) -> None:
    run.set("tracker_kwargs.wandb_project", value)
    if "wandb" not in (run.value("track_with") or []):
        run.set("track_with", [*(run.value("track_with") or ["console"]), "wandb"])


def _set_cpo_alpha(value: Any, run: Translation) -> None:
    if "simpo" not in run.losses:
        run.ignore("only with rl: simpo")
    elif value:
        run.set("rpo_alpha", value)
        run.differs("the NLL term of CPO-SimPO; TRL averages over the tokens of the batch, here per pair")
    else:
        run.ignore("off")


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


_OWN: dict[str, Rule] = {
    "base_model": to("pretrain"),
    "rl": by(_set_method, "pref_loss", note="dpo, ipo, simpo and orpo; kto and others have no equivalent"),
    "dpo_loss_type": by(set_losses("dpo_loss_weights", "dpo_label_smoothing"), "pref_loss", "label_smoothing"),
    "dpo_loss_weights": part_of("dpo_loss_type", "pref_loss"),
    "rl_beta": to("beta"),
    "dpo_beta": to("beta"),
    "trl.beta": to("beta"),
    "orpo_alpha": by(set_if_loss("beta", "orpo"), "beta"),
    "simpo_gamma": by(set_if_loss("gamma", "simpo"), "gamma"),
    "cpo_alpha": by(_set_cpo_alpha, "rpo_alpha"),
    "rpo_alpha": by(set_if_positive("rpo_alpha"), "rpo_alpha"),
    "dpo_label_smoothing": by(set_label_smoothing, "label_smoothing"),
    "dpo_use_weighting": to("use_wpo"),
    "dpo_generate_during_eval": samples(),
    "dpo_norm_loss": lacks("use pref_loss: sigmoid_norm"),
    "precompute_ref_log_probs": by(
        lambda v, run: run.set("reference.mode", "precompute") if v else run.ignore("the mode does not change numbers"),
        "reference.mode",
    ),
    "adapter": Rule(
        (f"{MODEL}lora_rank",), "lora or qlora, with `lora_r`", lambda v, run: run.use(f"{MODEL}lora_rank")
    ),
    "lora_r": by(if_lora(_is_lora, f"{MODEL}lora_rank"), f"{MODEL}lora_rank"),
    "lora_alpha": by(
        if_lora(_is_lora, f"{MODEL}lora_alpha", lora_alpha("peft_use_rslora", "lora_r")), f"{MODEL}lora_alpha"
    ),
    "lora_dropout": by(if_lora(_is_lora, f"{MODEL}lora_dropout"), f"{MODEL}lora_dropout"),
    "lora_target_linear": by(_set_linear, f"{MODEL}lora_target"),
    "lora_target_modules": by(_set_modules, f"{MODEL}lora_target"),
    "peft_use_rslora": part_of("lora_alpha", f"{MODEL}lora_alpha"),
    "peft_use_dora": planned("dora"),
    "lora_modules_to_save": planned("trained_modules"),
    "lora_model_dir": adapter(),
    "peft_init_lora_weights": lora_init(),
    "load_in_8bit": planned("quantization"),
    "load_in_4bit": planned("quantization"),
    "datasets": by(_set_datasets(FILES), FILES, "prompt_key", "chosen_key", "rejected_key"),
    "test_datasets": by(_set_datasets(VALIDATION_FILES), VALIDATION_FILES),
    "val_set_size": by(set_split, VALIDATION_SPLIT),
    "chat_template": template("tokenizer_default"),
    "chat_template_jinja": lacks("write the template to a file and set data_args.template to its path"),
    "chat_template_kwargs": template_argument(),
    "default_system_message": planned("system_prompt"),
    "sequence_len": by(_set_length, "sequence_length"),
    "excess_length_strategy": part_of("sequence_len", f"{DATA}truncation"),
    **drop("read by no DPO trainer", "max_prompt_len"),
    "dataset_processes": to(f"{DATA}preprocessing_num_workers"),
    "dataset_num_proc": to(f"{DATA}preprocessing_num_workers"),
    "micro_batch_size": to(f"{TRAINING}per_device_train_batch_size"),
    "gradient_accumulation_steps": to(f"{TRAINING}gradient_accumulation_steps"),
    "eval_batch_size": to(f"{TRAINING}per_device_eval_batch_size"),
    "num_epochs": to("num_train_epochs"),
    "optimizer": by(set_optimizer, note="AdamW is the only optimizer"),
    "lr_scheduler": by(set_schedule, f"{TRAINING}lr_scheduler_type"),
    "cosine_min_lr_ratio": by(_set_min_ratio, f"{TRAINING}lr_scheduler_type", f"{TRAINING}min_lr_ratio"),
    "bf16": by(_set_precision, f"{MODEL}dtype", f"{MODEL}master_dtype"),
    "bfloat16": by(_set_precision, f"{MODEL}dtype", f"{MODEL}master_dtype"),
    "float16": by(_set_float16, f"{MODEL}dtype"),
    "flash_attention": by(_set_attention("flash_attention_2"), f"{MODEL}attn_implementation"),
    "sdp_attention": by(_set_attention("sdpa"), f"{MODEL}attn_implementation"),
    "eager_attention": by(_set_attention("eager"), f"{MODEL}attn_implementation"),
    "attn_implementation": to(f"{MODEL}attn_implementation"),
    "trust_remote_code": to(f"{MODEL}trust_remote_code"),
    "revision_of_model": planned("revision", "main"),
    "special_tokens": by(_set_special_tokens, f"{MODEL}pad_token"),
    "tokenizer_config": tokenizer("base_model"),
    "tensor_parallel_size": axis("tp_size"),
    "context_parallel_size": axis("cp_size"),
    "sequence_parallel_degree": axis("cp_size"),
    "dp_replicate_size": axis("dp_replicate"),
    "use_wandb": by(track("wandb"), "track_with"),
    "use_mlflow": by(track("mlflow"), "track_with"),
    "use_tensorboard": by(track("tensorboard"), "track_with"),
    "wandb_project": by(_set_wandb_project, "tracker_kwargs.wandb_project", "track_with"),
    "wandb_entity": to("tracker_kwargs.wandb_entity"),
    "wandb_name": to("exp_name"),
    "mlflow_tracking_uri": to("tracker_kwargs.mlflow_tracking_uri"),
    "eval_steps": by(lambda v, run: run.set("eval_steps", int(v)), "eval_steps"),
    "save_steps": by(lambda v, run: run.set("save_steps", int(v)), "save_steps"),
    "evals_per_epoch": by(_set_times_per_epoch("eval_strategy"), "eval_strategy"),
    "saves_per_epoch": by(_set_times_per_epoch("save_strategy"), "save_strategy"),
    **drop("counted in steps or epochs here", "save_first_step"),
    "early_stopping_patience": lacks("a run ends after max_steps or num_train_epochs"),
    "embedding_lr": lacks("all parameters have one learning rate"),
    "lr_groups": lacks("all parameters have one learning rate"),
    "loraplus_lr_ratio": lacks("all parameters have one learning rate"),
    "cosine_constant_lr_ratio": lacks("the schedule has no constant tail"),
    "unfrozen_parameters": planned("freeze"),
    "dataset_exact_deduplication": lacks("repeated pairs are reported and kept; remove them from the file"),
    "shuffle_merged_datasets": lacks("pairs are shuffled every epoch", True),
    **lack(
        "the tokenizer's vocabulary cannot be changed",
        "tokens added_tokens_overrides resize_token_embeddings_to_32x eot_tokens fix_untrained_tokens",
    ),
    **lack(
        "the model's config cannot be changed",
        "overrides_of_model_config overrides_of_model_kwargs rope_scaling reinit_weights relora qat fp8 "
        "s2_attention scaling_softmax shrink_embeddings use_pose",
    ),
    **drop(
        "found from the model's files",
        "model_type tokenizer_type type_of_model base_model_config is_llama_derived_model "
        "is_mistral_derived_model is_qwen_derived_model is_falcon_derived_model cls_model_config num_labels "
        "tokenizer_use_mistral_common lora_fan_in_fan_out experimental_skip_move_to_device",
    ),
    **drop("the tokenizer is read as transformers does", "tokenizer_use_fast tokenizer_legacy"),
    **drop(
        "rows are packed in any case; numbers do not change",
        "sample_packing eval_sample_packing pad_to_sequence_len dpo_padding_free sample_packing_* "
        "batch_flattening multipack_* pad_to_multiple_of max_packed_sequence_len",
    ),
    **drop(
        "kernels; numbers change by rounding only",
        "dpo_use_liger_kernel lora_mlp_kernel lora_qkv_kernel lora_o_kernel plugins liger_rope liger_rms_norm "
        "liger_glu_activation liger_fused_linear_cross_entropy flash_attn_cross_entropy xformers_attention "
        "flex_attention sage_attention flash_attn_fuse_mlp lora_embedding_kernel flash_attn_* flash_optimum "
        "sdpa_varlen fused_attn_kernel large_head_attention gemma4_hybrid_attn_impl flex_attn_compile_kwargs "
        "fp32_norms fp32_norm_classes embeddings_skip_upcast use_kernels experts_implementation deepcompile "
        "llama4_linearized_experts torch_compile_options peft_autocast_adapter_dtype fp8_*",
    ),
    **drop(
        "prepared data is kept in output_dir",
        "dataset_prepared_path skip_prepare_dataset dataset_keep_in_memory push_dataset_to_hub dataset_shard_idx "
        "num_dataset_shards_to_save is_preprocess preprocess_iterable shuffle_before_merging_datasets",
    ),
    **drop(
        "trackers have no such setting",
        "use_swanlab swanlab_* "
        "wandb_watch wandb_log_model wandb_run_id mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts "
        "use_comet comet_* use_trackio trackio_* use_otel_metrics otel_metrics_* profiler_* include_tkps",
    ),
    **drop("prompts are never scored in preference training", "train_on_inputs"),
    **drop(
        "memory; numbers do not change",
        "activation_offloading layer_offloading lora_on_cpu gc_steps low_cpu_mem_usage device_map max_memory "
        "gpu_memory_limit qlora_sharded_model_loading dp_shard_size fsdp_version selective_checkpointing "
        "dynamic_checkpoint gc_collect_steps tiled_mlp* chunked_cross_entropy* dpo_use_logits_to_keep device",
    ),
    **drop("used by KTO", "kto_desirable_weight kto_undesirable_weight"),
    **drop("used with LoRA+", "loraplus_lr_embedding"),
    **lack(
        "adapters are the same in every layer",
        "lora_rank_pattern lora_alpha_pattern lora_target_parameters peft_layers_to_transform peft_layers_pattern "
        "peft_layer_replication peft_trainable_token_indices",
    ),
    **lack("AdamW is the only optimizer", "adam_beta3 adam_epsilon2 jagged_restart_steps lisa_n_layers"),
    **lack("there is no such schedule", "lr_quadratic_warmup lr_div_factor embedding_lr_scale"),
    **lack(
        "quantized weights are not supported",
        "gptq quantization model_quantization_config quantize_moe_experts use_onebitllms",
    ),
    **lack("this is not preference training", "reward_model process_reward_model use_eaft trainer_cls"),
    **lack("the rows of a file cannot be chosen", "dataset_shard_num min_sample_len curriculum_sampling"),
    **lack("noise on embeddings is not supported", "noisy_embedding_alpha"),
    "float32": by(lambda v, run: run.set(f"{MODEL}dtype", "fp32") if v else run.ignore("off"), f"{MODEL}dtype"),
    "wandb_mode": by(
        lambda v, run: (
            run.set("tracker_kwargs.wandb_mode", v)
            if v in ("online", "offline")
            else run.drop("auto, online or offline")
        ),
        "tracker_kwargs.wandb_mode",
    ),
    **drop("used by other methods", "trl.* vllm vllm.* ebft ebft.* eaft_* center_rewards_coefficient"),
    **drop("used with another optimizer", "dion_* qgalore_* jagged_restart_* lisa_* relora_*"),
    **drop("used in pretraining", "pretrain_* pretraining_* pose_* streaming* scaling_softmax_*"),
    **drop(
        "generation is not part of training",
        "generate_samples generation_* num_generation_samples eval_max_new_tokens eval_table_size "
        "gradio_* do_bench_eval bench_* do_causal_lm_eval eval_causal_lm_metrics "
        "eval_sequence_len merge_*",
    ),
    **drop(
        "placement; numbers do not change",
        "heads_k_stride ring_attn_func world_size ddp fsdp_final_state_dict_type resources_per_worker ray_run_name",
    ),
    **drop("images are not supported", "processor_type processor_kwargs freeze_mm_modules"),
    **drop(
        "found by axolotl itself",
        "axolotl_config_path total_num_tokens total_supervised_tokens batch_size peft bnb_config_kwargs "
        "peft_ensure_weight_tying mean_resizing_embeddings tokenizer_save_jinja_files torchdistx_path",
    ),
    **drop("used with quantization", "model_quantization_config_kwargs"),
    **drop("a run stops after max_consecutive_skipped_steps", "loss_watchdog_threshold loss_watchdog_patience"),
    **drop(
        "the runtime is thresher's",
        "strict use_ray ray_num_workers hf_use_auth_token auto_resume_from_checkpoints",
    ),
}

_SHARED = {key: rule for key, rule in huggingface.TABLE.items() if key not in ("num_train_epochs", "optim", "run_name")}
TABLE: dict[str, Rule] = {**_OWN, **_SHARED, **_OWN}


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    simpo = {"simpo_gamma": 0.5, "cpo_alpha": 1.0} if given.get("rl") == "simpo" else {}
    beta = {} if given.keys() & {"rl_beta", "dpo_beta", "trl.beta", "orpo_alpha"} else {"rl_beta": 0.1}
    warmup = {} if given.keys() & {"warmup_steps", "warmup_ratio"} else {"warmup_ratio": 0.03}
    cadences = {
        f"{what}_strategy": "epoch"
        for what in ("eval", "save")
        if not given.keys() & {f"{what}_strategy", f"{what}_steps", f"{what}s_per_epoch"}
    }
    return {
        **beta,
        **simpo,
        **warmup,
        **cadences,
        "sequence_len": 512,
        "micro_batch_size": 1,
        "num_epochs": 1.0,
        "save_total_limit": 4,
        **({} if any(given.get(key) for key in ("fp16", "float16", "float32")) else {"bf16": "auto"}),
    }


AXOLOTL = Dialect(
    name="axolotl",
    title="axolotl",
    table=TABLE,
    defaults=_defaults,
    marks=(frozenset({"base_model"}),),
    programs=("axolotl train", "axolotl.cli.train"),
)
