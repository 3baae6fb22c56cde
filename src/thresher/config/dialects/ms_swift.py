"""ms-swift: `swift rlhf` and `megatron rlhf`, as shell scripts or `args.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from thresher.config.dialects import huggingface
from thresher.config.dialects.engines import megatron, set_megatron
from thresher.config.dialects.huggingface import ratio, set_weight_dtype, source_name
from thresher.config.dialects.losses import LOSS_PARAMETERS, set_if_loss, set_if_positive, set_losses
from thresher.config.dialects.rules import (
    AXES,
    DATA,
    FILES,
    MODEL,
    TRAINING,
    VALIDATION_FILES,
    VALIDATION_SPLIT,
    Rule,
    adapter,
    by,
    drop,
    lack,
    lacks,
    lora_init,
    part_of,
    planned,
    set_reference_free,
    set_split,
    template,
    template_argument,
    to,
)
from thresher.config.dialects.translation import Dialect, Translation, axis
from thresher.config.dialects.trl import if_lora, lora_alpha, lora_targets

_MEGATRON_ONLY = (
    "micro_batch_size",
    "global_batch_size",
    "lr",
    "tensor_model_parallel_size",
    "mcore_model",
    "train_iters",
)
_TRUNCATION = {"delete": "drop", "left": "prompt_start", "right": "response_end"}
_ATTENTION = {
    "flash_attn": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
    "sdpa": "sdpa",
    "eager": "eager",
}
_RECOMPUTED = {"core_attn", "layernorm", "mlp", "moe"}
_TUNER_KEYS = ("tuner_type", "train_type", "sft_type")


def _is_megatron(values: Mapping[str, Any]) -> bool:
    return any(key in values for key in _MEGATRON_ONLY)


def _tuner(get: Any) -> str:
    given = next((get(key) for key in _TUNER_KEYS if get(key)), None)
    return str(given or "lora")


def _is_lora(run: Translation) -> bool:
    return _tuner(run.get) == "lora"


def _set_method(value: Any, run: Translation) -> None:
    if value in ("cpo", "simpo", "orpo"):
        run.set("pref_loss", "simpo" if run.get("loss_type") == "simpo" else value)
    elif value == "dpo":
        run.set("pref_loss", "sigmoid")
    elif value == "kto":
        run.plan("kto", "kto")
    else:
        run.lacks("this is not preference training")


def _set_loss(value: Any, run: Translation) -> None:
    if run.get("rlhf_type", "dpo") in ("cpo", "simpo", "orpo"):
        if value not in ("simpo", "sigmoid", *LOSS_PARAMETERS):
            run.lacks(f"there is no loss {value} without a reference")
        else:
            run.use("pref_loss")
    else:
        set_losses("loss_weights")(value, run)


def _set_tuner(value: Any, run: Translation) -> None:
    if value == "lora":
        run.use(f"{MODEL}lora_rank")
    elif value == "full":
        run.ignore("all weights are trained")
    else:
        run.lacks("only full fine-tuning and LoRA are supported")


def _set_files(target: str) -> Any:
    def function(value: Any, run: Translation) -> None:
        names = value if isinstance(value, list) else [value]
        files = []
        counts: list[int | None] = []
        for name in names:
            path, _, count = str(name).partition("#")
            path, _, subset = path.partition(":") if "://" not in path else (path, "", "")
            path = path.removeprefix("HF::").removeprefix("MS::")
            files.append(source_name(path, "train" if subset else None, subset or None))
            counts.append(int(count) if count else None)
        if any(counts):
            run.set(target.replace("file_name", "max_samples"), max(filter(None, counts)))
            if len(set(counts)) > 1:
                run.differs("max_samples is the same for all data sets here")
        run.set(target, files[0] if len(files) == 1 else files)
        if any(name.startswith("hf://") for name in files) and not run.get("use_hf"):
            run.note("ms-swift reads ModelScope, thresher the Hugging Face Hub; check the name")

    return function


def _set_truncation(value: Any, run: Translation) -> None:
    if value in _TRUNCATION:
        run.set(f"{DATA}truncation", _TRUNCATION[value])
    else:
        run.lacks("long pairs are dropped or cut")


def _set_attention(value: Any, run: Translation) -> None:
    if value in _ATTENTION:
        run.set(f"{MODEL}attn_implementation", _ATTENTION[value])
    else:
        run.ignore("chosen automatically")


def _set_min_lr(value: Any, run: Translation) -> None:
    if value and run.get("lr_decay_style", "cosine") == "cosine":
        run.set(f"{TRAINING}lr_scheduler_type", "cosine_with_min_lr")
        run.set(f"{TRAINING}min_lr_ratio", ratio(value, run.get("lr") or value))
    elif value:
        run.lacks("only a cosine schedule has a minimum")
    else:
        run.ignore("decays to 0")


def _set_recomputed_modules(value: Any, run: Translation) -> None:
    names = value.split(",") if isinstance(value, str) else list(value)
    if run.get("recompute_granularity") != "selective":
        run.ignore("without recompute_granularity selective")
    elif set(names) <= _RECOMPUTED:
        set_megatron(run, {"recompute_modules": names})
    else:
        run.drop(f"recomputed are {', '.join(sorted(_RECOMPUTED))}; numbers do not change")


def _set_decay(value: Any, run: Translation) -> None:
    names = {
        "constant": "constant_with_warmup",
        "linear": "linear",
        "cosine": "cosine",
        "inverse-square-root": "inverse_sqrt",
    }
    if value not in names:
        run.lacks(f"the schedules are {', '.join(huggingface.SCHEDULES)}")
    elif run.value(f"{TRAINING}lr_scheduler_type") != "cosine_with_min_lr":
        run.set(f"{TRAINING}lr_scheduler_type", names[value])
    else:
        run.use(f"{TRAINING}lr_scheduler_type")


_OWN: dict[str, Rule] = {
    "rlhf_type": by(_set_method, "pref_loss", note="dpo, cpo, simpo and orpo; kto and others have no equivalent"),
    "loss_type": by(_set_loss, "pref_loss"),
    "loss_weights": part_of("loss_type", "pref_loss"),
    "model": to("pretrain", "ms-swift reads ModelScope unless use_hf is set, thresher the Hugging Face Hub"),
    "beta": to("beta"),
    "label_smoothing": by(
        set_if_loss("label_smoothing", "sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"), "label_smoothing"
    ),
    "rpo_alpha": by(set_if_positive("rpo_alpha"), "rpo_alpha"),
    "ld_alpha": to("ld_alpha"),
    "discopop_tau": by(set_if_loss("discopop_tau", "discopop"), "discopop_tau"),
    "f_divergence_type": to("f_divergence_type"),
    "simpo_gamma": by(set_if_loss("gamma", "simpo"), "gamma"),
    "cpo_alpha": by(set_if_loss("cpo_alpha", "cpo"), "cpo_alpha", note="with simpo: the NLL term, see rpo_alpha"),
    "reference_free": by(set_reference_free, "reference.mode"),
    "ref_model": to("reference.model_args.model_name_or_path"),
    "ref_adapters": planned("adapter"),
    "adapters": adapter(),
    **dict.fromkeys(_TUNER_KEYS, by(_set_tuner, f"{MODEL}lora_rank", note="full or lora")),
    "lora_rank": by(if_lora(_is_lora, f"{MODEL}lora_rank"), f"{MODEL}lora_rank"),
    "lora_alpha": by(
        if_lora(_is_lora, f"{MODEL}lora_alpha", lora_alpha("use_rslora", "lora_rank")), f"{MODEL}lora_alpha"
    ),
    "lora_dropout": by(if_lora(_is_lora, f"{MODEL}lora_dropout"), f"{MODEL}lora_dropout"),
    "target_modules": by(if_lora(_is_lora, f"{MODEL}lora_target", lora_targets), f"{MODEL}lora_target"),
    "use_rslora": part_of("lora_alpha", f"{MODEL}lora_alpha"),
    "use_dora": planned("dora"),
    "modules_to_save": planned("trained_modules"),
    "target_regex": lacks("adapters are on named modules"),
    "target_parameters": lacks("adapters are on named modules"),
    "init_weights": lora_init(),
    "lora_bias": lacks("biases are not trained", "none"),
    "lorap_lr_ratio": lacks("all parameters have one learning rate"),
    "quant_method": planned("quantization"),
    "quant_bits": planned("quantization"),
    "torch_dtype": by(
        set_weight_dtype(lambda run: not _is_lora(run) and not _is_megatron(run._source)), f"{MODEL}dtype"
    ),
    "attn_impl": by(_set_attention, f"{MODEL}attn_implementation"),
    "model_revision": planned("revision", "main", "master"),
    "dataset": by(_set_files(FILES), FILES),
    "val_dataset": by(_set_files(VALIDATION_FILES), VALIDATION_FILES),
    "split_dataset_ratio": by(set_split, VALIDATION_SPLIT),
    "max_length": to("sequence_length"),
    "truncation_strategy": by(_set_truncation, f"{DATA}truncation"),
    "template": template(),
    "system": planned("system_prompt"),
    "enable_thinking": template_argument("enable_thinking"),
    "interleave_prob": planned("mixing"),
    "columns": lacks("set prompt_key, chosen_key and rejected_key"),
    "loss_scale": lacks("every token of a response has the same weight", "default", "last_round", "all"),
    "dataset_shuffle": lacks("pairs are shuffled every epoch", True),
    "train_dataloader_shuffle": lacks("pairs are shuffled every epoch", True),
    "router_aux_loss_coef": planned("moe_aux_loss", 0, 0.0),
    "moe_aux_loss_coeff": planned("moe_aux_loss", 0, 0.0),
    "rope_scaling": lacks("set rope_scaling in the model's config.json"),
    "new_special_tokens": lacks("the tokenizer's vocabulary cannot be changed"),
    "sequence_parallel_size": axis("cp_size"),
    "optimizer": by(
        lambda v, run: (
            run.ignore("AdamW is the optimizer here") if v == "adam" else run.lacks("AdamW is the only optimizer")
        ),
        note="AdamW is the only optimizer",
    ),
    "freeze_llm": planned("freeze"),
    "freeze_parameters": to(f"{MODEL}freeze_module_prefix"),
    "freeze_parameters_regex": planned("freeze"),
    "freeze_parameters_ratio": planned("freeze", 0.0, 0),
    "use_galore": lacks("AdamW is the only optimizer"),
    "lisa_activated_layers": lacks("all layers are trained", 0),
    # megatron rlhf
    "lr": to(f"{TRAINING}learning_rate"),
    "min_lr": by(_set_min_lr, f"{TRAINING}lr_scheduler_type", f"{TRAINING}min_lr_ratio"),
    "lr_decay_style": by(_set_decay, f"{TRAINING}lr_scheduler_type"),
    "lr_warmup_fraction": to(f"{TRAINING}warmup_ratio"),
    "lr_warmup_iters": to(f"{TRAINING}warmup_steps"),
    "lr_warmup_init": lacks("a warm-up starts at 0", 0, 0.0),
    "micro_batch_size": to(f"{TRAINING}per_device_train_batch_size"),
    "global_batch_size": to(f"{TRAINING}global_batch_size"),
    "train_iters": to("max_steps"),
    "clip_grad": to(f"{TRAINING}max_grad_norm"),
    "adam_eps": to(f"{TRAINING}adam_epsilon"),
    **{
        f"{name}_parallel_size": megatron(f"{name}_parallel_size", 1)
        for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model")
    },
    "sequence_parallel": megatron("sequence_parallel", False),
    "use_distributed_optimizer": megatron("use_distributed_optimizer", True),
    "overlap_grad_reduce": megatron("overlap_grad_reduce", False),
    "overlap_param_gather": megatron("overlap_param_gather", False),
    "recompute_granularity": megatron("recompute_granularity", "none"),
    "recompute_method": megatron("recompute_method"),
    "recompute_num_layers": megatron("recompute_num_layers"),
    "recompute_modules": by(_set_recomputed_modules, AXES.removesuffix("."), note="with `selective`"),
    "moe_token_dispatcher_type": megatron("moe_token_dispatcher_type", "alltoall"),
    "wandb_project": to("tracker_kwargs.wandb_project"),
    "wandb_exp_name": to("exp_name"),
    "eval_steps": by(
        lambda v, run: run.set("eval_steps", int(v)) if float(v) >= 1 else run.drop("counted in steps here"),
        "eval_steps",
    ),
    **drop("adapters are fp32", "lora_dtype"),
    **drop(
        "used with quantization",
        "bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_quant_storage hqq_axis",
    ),
    **drop(
        "found from the model's files",
        "model_type ref_model_type task_type num_labels problem_type init_strategy max_model_len model_kwargs mtp_*",
    ),
    **drop(
        "prepared data is cached by its content",
        "load_from_cache_file download_mode cached_dataset lazy_tokenize cached_val_dataset packing_num_proc",
    ),
    **drop(
        "rows are packed in any case; numbers do not change",
        "padding_free packing packing_length padding_side packing_strategy",
    ),
    **drop(
        "sharding and placement; numbers do not change",
        "device_map max_memory expert_tensor_parallel_size tp_comm_overlap "
        "optimizer_cpu_offload optimizer_offload_fraction use_precision_aware_optimizer zero_hpz_partition_size "
        "decoder_first_pipeline_num_layers use_megatron_fsdp decoder_last_pipeline_num_layers data_sharding "
        "account_for_* align_* batch_p2p_comm cp_* data_parallel_* deepspeed_autotp_size overlap_* manual_gc* "
        "microbatch_group_size_per_vp_stage nccl_comm_warmup pipeline_model_parallel_layout "
        "sequence_packing_scheduler optimizer_cuda_graph use_cpu_initialization perform_initialization",
    ),
    **drop(
        "kernels; numbers change by rounding only",
        "attention_backend cross_entropy_loss_fusion cross_entropy_fusion_impl masked_softmax_fusion "
        "bias_dropout_fusion bias_activation_fusion experts_impl apply_rope_fusion gradient_accumulation_fusion "
        "moe_grouped_gemm moe_permute_fusion moe_router_dtype moe_shared_expert_overlap "
        "attention_softmax_in_fp32 use_logits_to_keep accumulate_allreduce_grads_in_fp32 te_rng_tracker apply_* "
        "use_fused_mhc mlp_padding_free exp_avg_* main_* linear_decoupled_in_proj enable_npu_model_patch "
        "moe_enable_deepep moe_layer_recompute csa_dense_mode mhc_recompute_layer_num bridge_backend",
    ),
    **drop(
        "images are not supported",
        "max_pixels freeze_vit freeze_aligner aligner_lr norm_bbox vit_* language_model_only",
    ),
    **drop(
        "checkpoints hold the full state",
        "finetune no_save_optim no_save_rng no_load_optim no_load_rng async_save resume_only_model use_flash_ckpt "
        "create_checkpoint_symlink max_shard_size safe_serialization dist_ckpt_* distrib_optim_* "
        "use_persistent_ckpt_worker save_missing_weights merge_lora",
    ),
    **drop("output_dir is used as it is", "add_version"),
    **drop(
        "where ms-swift looks for models and data",
        "use_hf hub_token local_repo_path custom_dataset_info model_name model_author external_plugins "
        "custom_register_path load_args load_data_args",
    ),
    **drop(
        "the tokenizer's template is used",
        "use_chat_template template_backend agent_template response_prefix add_non_thinking_prefix "
        "disable_ignore_empty_think disable_auto_column_mapping",
    ),
    **drop(
        "generation is not part of training",
        "max_new_tokens temperature max_completion_length stream predict_with_generate eval_metric top_k top_p "
        "num_beams repetition_penalty logprobs top_logprobs stop_words eval_dataset eval_dataset_args "
        "eval_generation_config eval_limit eval_use_evalscope extra_eval_args structured_outputs_regex "
        "ds3_gather_for_generation",
    ),
    **drop("used by KTO", "desirable_weight undesirable_weight calculate_KL"),
    **drop(
        "messages and checks",
        "check_model ignore_args_error acc_strategy strict metric_warmup_step enable_channel_loss enable_dft_loss "
        "tensorboard_dir tensorboard_queue_size eval_iters shuffle_buffer_size tuner_backend streaming "
        "stopping_strategy val_dataset_shuffle",
    ),
    **drop(
        "used by another tuner or optimizer",
        "sgd_momentum lisa_step_interval adalora_* boft_* fourier_* vera_* reft_* llamapro_* lora_ga_* galore_* "
        "muon_* adapter_act adapter_length use_swift_lora lr_wsd_* lr_decay_iters",
    ),
    **drop("used by other methods", "gkd_* lmbda seq_kd sft_alpha center_rewards_coefficient mrl_dims"),
    **drop("trackers have no such setting", "swanlab_*"),
    **drop("used with fp8", "fp8_* fp4_*"),
    **drop("every token of a response has the same weight", "is_binary_loss_scale calculate_per_token_loss"),
    "preserve_thinking": template_argument("preserve_thinking"),
    "ref_adapter_name": planned("adapter"),
    "mcore_adapter": planned("adapter"),
    "ref_model_revision": Rule(("reference.model_args.revision",), neutral=("main", "master")),
    "trainable_parameters": planned("freeze"),
    "trainable_parameters_regex": planned("freeze"),
    "mcore_model": lacks("a Megatron checkpoint; give a Hugging Face model as `model`"),
    "callbacks": lacks("callbacks of ms-swift are not run"),
    "megatron_extra_kwargs": lacks("settings of Megatron's model cannot be changed"),
    **lack("experts are not dropped and have no z-loss", "moe_expert_capacity_factor moe_z_loss_coeff"),
    **lack("experts are not dropped and have no z-loss", {"moe_pad_expert_input_to_capacity": False}),
    **drop("used with the auxiliary loss of experts", "moe_router_load_balancing_type moe_token_drop_policy"),
    **lack("weight decay is constant", {"start_weight_decay": None, "weight_decay_incr_style": "constant"}),
    **lack("weight decay is constant", {"end_weight_decay": None}),
    **lack("an auxiliary loss of sparse attention", {"dsa_indexer_loss_coeff": 0.0}),
    **drop("used with dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
    **lack("fp8 is not supported", {"fp8_format": None, "fp4_format": None}),
    **lack("a run ends after max_steps or num_train_epochs", {"early_stop_interval": None, "max_epochs": None}),
    **lack("multi-token prediction is not trained", {"mtp_num_layers": None}),
}

TABLE: dict[str, Rule] = {**_OWN, **huggingface.TABLE, **_OWN}


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    megatron = _is_megatron(given)
    tuner = next((given[key] for key in _TUNER_KEYS if key in given), "full" if megatron else "lora")
    rate = 1e-5 if tuner == "full" else 1e-4
    simpo = given.get("rlhf_type") == "simpo"
    common = {
        "rlhf_type": "dpo",
        "beta": 2.0 if simpo else 0.1,
        **({"simpo_gamma": 1.0} if simpo else {}),
        **({"tuner_type": tuner} if not given.keys() & set(_TUNER_KEYS) else {}),
        **(
            {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
            if tuner == "lora"
            else {}
        ),
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "logging_steps": 5,
        "save_steps": 500,
        "report_to": ["tensorboard"],
    }
    if megatron:
        return {
            **common,
            "lr": rate,
            "lr_decay_style": "cosine",
            "micro_batch_size": 1,
            "global_batch_size": 16,
            "recompute_granularity": "selective",
        }
    batch = given.get("per_device_train_batch_size")
    batch = batch if isinstance(batch, int) and batch > 0 else 1
    return {
        **common,
        "learning_rate": rate,
        "num_train_epochs": 3.0,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": max(1, math.ceil(16 / batch / given["processes"])),
        "lr_scheduler_type": "cosine",
        "gradient_checkpointing": True,
    }


MS_SWIFT = Dialect(
    name="ms-swift",
    title="ms-swift",
    table=TABLE,
    defaults=_defaults,
    marks=(frozenset({"rlhf_type"}), frozenset({"model", "dataset", "tuner_type"}), frozenset({"split_dataset_ratio"})),
    programs=("swift rlhf", "megatron rlhf", "swift/cli/rlhf.py", "swift/cli/_megatron/rlhf.py"),
)
