"""ms-swift: `swift rlhf` and `megatron rlhf`, as shell scripts or `args.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from thresher.config.roles import SCHEDULES
from thresher.importers import huggingface, mixtures
from thresher.importers import rules as r
from thresher.importers.engines import PARALLEL_SIZES, megatron, set_megatron
from thresher.importers.translation import (
    DATA,
    ENGINE,
    EVAL_FILES,
    EVAL_SPLIT,
    FILES,
    MODEL,
    SOURCES,
    TRAINING,
    Translation,
)

_MEGATRON_ONLY = {
    "micro_batch_size",
    "global_batch_size",
    "lr",
    "tensor_model_parallel_size",
    "mcore_model",
    "train_iters",
}
_TRUNCATION = {"delete": "drop", "left": "prompt_start", "right": "response_end"}
_ATTENTION = {"flash_attn": "flash_attention_2"} | {name: name for name in ("flash_attention_2", "sdpa", "eager")}
_DECAYS = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "inverse-square-root": "inverse_sqrt",
}
_RECOMPUTED = {"core_attn", "layernorm", "mlp", "moe"}
_TUNER_KEYS = ("tuner_type", "train_type", "sft_type")


def _is_megatron(values: Mapping[str, Any]) -> bool:
    return not _MEGATRON_ONLY.isdisjoint(values)


def _is_lora(run: Translation) -> bool:
    return next((run.get(key) for key in _TUNER_KEYS if run.get(key)), "lora") == "lora"


def _set_method(value: Any, run: Translation) -> None:
    if value in ("cpo", "simpo", "orpo"):
        run.set("pref_loss", "simpo" if run.get("loss_type") == "simpo" else value)
    elif value == "dpo":
        run.set("pref_loss", "sigmoid")
    elif value in ("kto", "rm"):
        r.set_method("kto" if value == "kto" else "bradley_terry", run)
    else:
        run.lacks(r.OTHER_METHOD)


def _set_loss(value: Any, run: Translation) -> None:
    from thresher.losses import loss_names  # imports torch

    if run.get("rlhf_type") == "rm":
        run.ignore("a reward model has one loss")
    elif run.get("rlhf_type", "dpo") not in ("cpo", "simpo", "orpo"):
        r.set_losses(value, run, "loss_weights")
    elif value in loss_names() and value != "alphapo":  # ms-swift has no key for its alpha
        run.use("pref_loss")
    else:
        run.lacks(f"ms-swift's {value} without a reference has no equivalent")


def _dataset(text: str) -> mixtures.Dataset:
    """Read HUB::NAME:SUBSET/SUBSET#NUMBER, where all but the name is optional."""
    hub, separator, rest = text.partition("::")
    name, _, count = (rest if separator else hub).partition("#")
    path, _, subsets = name.partition(":") if "://" not in name else (name, "", "")
    files = [
        file
        for each in subsets.split("/")
        for file in mixtures.named_files(path, None, "train" if each else None, each)
    ]
    return mixtures.Dataset(files, count=int(count) if count else None)


def _set_datasets(target: str) -> r.Function:
    def function(value: Any, run: Translation) -> None:
        names = [str(name) for name in (value if isinstance(value, list) else [value])]
        datasets = [_dataset(name) for name in names]
        is_interleaved = target == FILES and len(datasets) > 1 and run.get("interleave_prob")
        if len(datasets) == 1 and datasets[0].count:
            run.set(target.replace("file_name", "max_samples"), datasets[0].count)
            datasets[0].count = None
        elif is_interleaved:
            mixtures.interleave(
                datasets, run.get("interleave_prob"), until_last=run.get("stopping_strategy") == "all_exhausted"
            )
        mixtures.set_datasets(run, target, datasets, is_named=bool(is_interleaved))
        if not run.get("use_hf") and any(
            file.startswith("hf://") and not name.lower().startswith("hf::")
            for name, each in zip(names, datasets, strict=True)
            for file in each.files
        ):
            run.note("ms-swift reads ModelScope, thresher the Hugging Face Hub; check the name")

    return function


def _set_min_lr(value: Any, run: Translation) -> None:
    if run.get("lr_decay_style", "cosine") == "cosine":
        run.set(f"{TRAINING}lr_scheduler_type", "cosine_with_min_lr")
        run.set(f"{TRAINING}min_lr_ratio", r.ratio(value, run.get("lr") or value))
    else:
        run.lacks("only a cosine schedule has a minimum")


def _set_recomputed_modules(value: Any, run: Translation) -> None:
    names = value.split(",") if isinstance(value, str) else list(value)
    if run.get("recompute_granularity") != "selective":
        run.ignore("without recompute_granularity selective")
    elif set(names) <= _RECOMPUTED:
        set_megatron(run, {"recompute_modules": names})
    else:
        run.drop(f"recomputed are {', '.join(sorted(_RECOMPUTED))}; numbers do not change")


def _set_decay(value: Any, run: Translation) -> None:
    if value not in _DECAYS:
        run.lacks(f"the schedules are {', '.join(SCHEDULES)}")
    elif run.value(f"{TRAINING}lr_scheduler_type") != "cosine_with_min_lr":
        run.set(f"{TRAINING}lr_scheduler_type", _DECAYS[value])
    else:
        run.use(f"{TRAINING}lr_scheduler_type")


_OWN: r.Table = {
    "rlhf_type": r.by(_set_method, "pref_loss", note="dpo, cpo, simpo, orpo, kto and rm; others have no equivalent"),
    "loss_type": r.by(_set_loss, "pref_loss"),
    "loss_weights": r.part_of("loss_type", "pref_loss"),
    **r.LABEL_WEIGHTS,
    "center_rewards_coefficient": r.if_loss("center_rewards_coefficient", "bradley_terry"),
    "model": r.to("pretrain", "ms-swift reads ModelScope unless use_hf is set, thresher the Hugging Face Hub"),
    **r.kept("", "beta ld_alpha f_divergence_type"),
    "label_smoothing": r.if_loss("label_smoothing", "sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"),
    "rpo_alpha": r.switch("rpo_alpha"),
    "discopop_tau": r.if_loss("discopop_tau", "discopop"),
    "simpo_gamma": r.if_loss("gamma", "simpo"),
    "cpo_alpha": r.if_loss("cpo_alpha", "cpo"),
    "reference_free": r.switch("reference.mode", "none", off="there is a reference"),
    "ref_model": r.to("reference.model_args.model_name_or_path"),
    "ref_model_revision": r.to("reference.model_args.revision", neutral=("main", "master")),
    **r.lack(r.REFERENCE_ADAPTER, "ref_adapters ref_adapter_name mcore_adapter"),
    "adapters": r.ADAPTER,
    **dict.fromkeys(_TUNER_KEYS, r.lora_switch("full or lora", full="full")),
    **r.lora_rules(
        _is_lora,
        "lora_rank",
        targets="target_modules",
        parameters="target_parameters",
        rslora="use_rslora",
        dora="use_dora",
    ),
    "modules_to_save": r.modules_to_save(_is_lora),
    "target_regex": r.lacks("adapters are on named modules"),
    "init_weights": r.LORA_INIT,
    "lora_bias": r.lacks("biases are not trained", "none"),
    "lorap_lr_ratio": r.lora_plus(_is_lora),
    "quant_method": r.lacks(r.QUANTIZED, "bnb"),
    **r.quantization(
        _is_lora, {"quant_bits": None}, "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", is_double=True
    ),
    "torch_dtype": r.by(
        huggingface.set_weight_dtype(lambda run: not _is_lora(run) and not _is_megatron(run.source)), f"{MODEL}dtype"
    ),
    "attn_impl": r.choice(f"{MODEL}attn_implementation", _ATTENTION, ignore="chosen automatically"),
    "model_revision": r.to(f"{MODEL}revision", neutral=("main", "master")),
    "dataset": r.by(_set_datasets(FILES), FILES, SOURCES),
    "val_dataset": r.by(_set_datasets(EVAL_FILES), *mixtures.EVALUATION_DATA),
    "split_dataset_ratio": r.by(r.set_split, EVAL_SPLIT),
    "max_length": r.to("sequence_length"),
    "truncation_strategy": r.choice(f"{DATA}truncation", _TRUNCATION, lacks="long pairs are dropped or cut"),
    "template": r.template(),
    "use_chat_template": r.lacks("set actor_train.data_args.template=raw for rows of plain text", True),
    "response_prefix": r.lacks("add the prefix to the prompts, or to the chat template"),
    **r.drop("the tokenizer's template is used", "template_backend agent_template add_non_thinking_prefix"),
    "system": r.to(f"{DATA}system_prompt"),
    **{name: r.template_argument(name) for name in ("enable_thinking", "preserve_thinking")},
    "interleave_prob": r.by(mixtures.set_interleaved, SOURCES, note="with the number of rows of each dataset"),
    "stopping_strategy": r.part_of("interleave_prob", SOURCES),
    "columns": r.lacks("set prompt_key, chosen_key and rejected_key"),
    "loss_scale": r.lacks("every token of a response has the same weight", "default", "last_round", "all"),
    **r.lack(r.SHUFFLED, {"dataset_shuffle": True, "train_dataloader_shuffle": True}),
    **dict.fromkeys(
        ("router_aux_loss_coef", "moe_aux_loss_coeff"), r.to(f"{MODEL}moe_aux_loss_coef", neutral=(0, 0.0))
    ),
    **r.drop("the auxiliary loss is transformers' own", "moe_router_load_balancing_type"),
    "rope_scaling": r.lacks("set rope_scaling in the model's config.json"),
    "new_special_tokens": r.lacks(r.VOCABULARY),
    "sequence_parallel_size": r.size("cp_size"),
    "optimizer": r.lacks(r.OTHER_OPTIMIZER, "adam", "lorap"),
    "freeze_parameters": r.to(f"{MODEL}freeze_module_prefix"),
    **r.lack(r.FROZEN, {"freeze_llm": None, "freeze_parameters_regex": None, "freeze_parameters_ratio": 0.0}),
    **r.lack(r.FROZEN, "trainable_parameters trainable_parameters_regex"),
    "use_galore": r.lacks(r.OTHER_OPTIMIZER),
    "lisa_activated_layers": r.lacks("all layers are trained", 0),
    # megatron rlhf
    "lr": r.to(f"{TRAINING}learning_rate"),
    "min_lr": r.by(_set_min_lr, f"{TRAINING}lr_scheduler_type", f"{TRAINING}min_lr_ratio", off="decays to 0"),
    "lr_decay_style": r.by(_set_decay, f"{TRAINING}lr_scheduler_type"),
    "lr_decay_iters": r.lacks("a schedule ends with the run"),
    "lr_warmup_fraction": r.to(f"{TRAINING}warmup_ratio"),
    "lr_warmup_iters": r.to(f"{TRAINING}warmup_steps"),
    "lr_warmup_init": r.lacks("a warm-up starts at 0", 0, 0.0),
    "micro_batch_size": r.to(f"{TRAINING}per_device_train_batch_size"),
    "global_batch_size": r.to(f"{TRAINING}global_batch_size"),
    "train_iters": r.to("max_steps"),
    "clip_grad": r.to(f"{TRAINING}max_grad_norm"),
    "adam_eps": r.to(f"{TRAINING}adam_epsilon"),
    **{name: megatron(name, 1) for name in PARALLEL_SIZES},
    **{name: megatron(name, False) for name in ("sequence_parallel", "overlap_grad_reduce", "overlap_param_gather")},
    **{name: megatron(name) for name in ("recompute_method", "recompute_num_layers")},
    "use_distributed_optimizer": megatron("use_distributed_optimizer", True),
    "recompute_granularity": megatron("recompute_granularity", "none"),
    "recompute_modules": r.by(_set_recomputed_modules, ENGINE.removesuffix(".")),
    "moe_token_dispatcher_type": megatron("moe_token_dispatcher_type", "alltoall"),
    **r.kept("tracker_kwargs.", "wandb_project"),
    "wandb_exp_name": r.to("exp_name"),
    "eval_steps": r.steps("eval_steps"),
    "mcore_model": r.lacks("a Megatron checkpoint; give a Hugging Face model as `model`"),
    "callbacks": r.lacks("callbacks of ms-swift are not run"),
    "megatron_extra_kwargs": r.lacks("settings of Megatron's model cannot be changed"),
    **r.lack(
        "experts are not dropped and have no z-loss",
        "moe_expert_capacity_factor moe_z_loss_coeff moe_pad_expert_input_to_capacity",
    ),
    **r.lack("weight decay is constant", "start_weight_decay end_weight_decay"),
    "weight_decay_incr_style": r.lacks("weight decay is constant", "constant"),
    "dsa_indexer_loss_coeff": r.lacks("an auxiliary loss of sparse attention", 0.0),
    **r.lack("fp8 is not supported", "fp8_format fp4_format"),
    **r.lack("a run ends after max_steps or num_train_epochs", "early_stop_interval max_epochs"),
    "mtp_num_layers": r.lacks("multi-token prediction is not trained"),
}
TABLE: r.Table = {**_OWN, **huggingface.TABLE, **_OWN}
# other tuners, optimizers and methods, images, generation, kernels, placement, packing, caches, checkpoints and checks
NEUTRAL = f"""{huggingface.NEUTRAL}
acc_strategy account_for_* accumulate_allreduce_grads_in_fp32 adalora_* adapter_act adapter_length add_version align_*
aligner_lr apply_rope_fusion async_save attention_backend attention_softmax_in_fp32 batch_p2p_comm bias_*_fusion
bnb_4bit_compute_dtype bnb_4bit_quant_storage boft_* bridge_backend cached_dataset cached_val_dataset calculate_KL
calculate_per_token_loss
check_model cp_* create_checkpoint_symlink cross_entropy_* csa_dense_mode
custom_dataset_info custom_register_path data_parallel_* data_sharding decoder_*_pipeline_num_layers
deepspeed_autotp_size device_map disable_auto_column_mapping disable_ignore_empty_think dist_ckpt_*
distrib_optim_* download_mode ds3_gather_for_generation dsa_indexer_use_sparse_loss enable_channel_loss enable_dft_loss
enable_npu_model_patch eval_dataset eval_dataset_args eval_generation_config eval_iters eval_limit eval_metric
eval_use_evalscope exp_avg_* expert_tensor_parallel_size experts_impl external_plugins extra_eval_args finetune
fourier_* fp4_* fp8_* freeze_aligner freeze_vit galore_* gkd_* gradient_accumulation_fusion hqq_axis ignore_args_error
is_binary_loss_scale language_model_only lazy_tokenize linear_decoupled_in_proj lisa_step_interval llamapro_* lmbda
load_args load_data_args load_from_cache_file local_repo_path logprobs lora_dtype lora_ga_* lr_wsd_* main_* manual_gc*
masked_softmax_fusion max_completion_length max_memory max_new_tokens max_pixels max_shard_size merge_lora
metric_warmup_step mhc_recompute_layer_num microbatch_group_size_per_vp_stage mlp_padding_free model_author model_name
model_type moe_enable_deepep moe_grouped_gemm moe_layer_recompute moe_permute_fusion moe_router_dtype
moe_shared_expert_overlap moe_token_drop_policy mrl_dims mtp_* muon_* nccl_comm_warmup no_load_* no_save_* norm_bbox
num_beams num_labels optimizer_cpu_offload optimizer_cuda_graph optimizer_offload_fraction overlap_* packing packing_*
padding_free padding_side perform_initialization pipeline_model_parallel_layout predict_with_generate problem_type
ref_model_type reft_* repetition_penalty resume_only_model safe_serialization save_missing_weights seq_kd
sequence_packing_scheduler sft_alpha sgd_momentum shuffle_buffer_size stop_words stream streaming
strict structured_outputs_regex swanlab_* task_type te_rng_tracker temperature tensorboard_dir tensorboard_queue_size
top_k top_logprobs top_p tp_comm_overlap tuner_backend use_cpu_initialization use_flash_ckpt
use_fused_mhc use_hf use_logits_to_keep use_megatron_fsdp use_persistent_ckpt_worker use_precision_aware_optimizer
use_swift_lora val_dataset_shuffle vera_* vit_* zero_hpz_partition_size
"""


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    megatron = _is_megatron(given)
    tuner = next((given[key] for key in _TUNER_KEYS if key in given), "full" if megatron else "lora")
    rate = 1e-5 if tuner == "full" else 1e-4
    simpo = given.get("rlhf_type") == "simpo"
    lora = {"lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}
    loss = {"rlhf_type": "dpo", "beta": 2.0 if simpo else 0.1, **({"simpo_gamma": 1.0} if simpo else {})}
    named = {} if given.keys() & set(_TUNER_KEYS) else {"tuner_type": tuner}
    optimizer = {"weight_decay": 0.1, "adam_beta2": 0.95}
    logs = {"logging_steps": 5, "save_steps": 500, "report_to": ["tensorboard"]}
    common = {**loss, **named, **(lora if tuner == "lora" else {}), **optimizer, **logs}
    if megatron:
        sizes = {"micro_batch_size": 1, "global_batch_size": 16}
        return {**common, "lr": rate, "lr_decay_style": "cosine", **sizes, "recompute_granularity": "selective"}
    batch = given.get("per_device_train_batch_size")
    batch = batch if isinstance(batch, int) and batch > 0 else 1
    accumulation = max(1, math.ceil(16 / batch / given["processes"]))
    steps = {"num_train_epochs": 3.0, "per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation}
    schedule = {"learning_rate": rate, "lr_scheduler_type": "cosine"}
    return {**common, **steps, **schedule, "gradient_checkpointing": True}
