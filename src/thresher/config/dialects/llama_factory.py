"""LLaMA-Factory (`stage: dpo`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thresher.config.dialects import huggingface
from thresher.config.dialects.huggingface import source_name
from thresher.config.dialects.losses import set_if_loss, set_if_positive
from thresher.config.dialects.rules import (
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
    part_of,
    planned,
    set_split,
    template,
    template_argument,
    to,
)
from thresher.config.dialects.translation import Dialect, Translation
from thresher.config.dialects.trl import if_lora, lora_alpha, lora_targets

_LOSSES = ("sigmoid", "hinge", "ipo", "orpo", "simpo")
_ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}


def _is_lora(run: Translation) -> bool:
    return bool(run.get("finetuning_type", "lora") == "lora")


def _set_stage(value: Any, run: Translation) -> None:
    if value == "dpo":
        run.ignore("preference training")
    elif value == "kto":
        run.plan("kto", "kto")
    else:
        run.lacks("this is not preference training")


def _set_tuning(value: Any, run: Translation) -> None:
    if value == "lora":
        run.use(f"{MODEL}lora_rank")
    elif value == "full":
        run.ignore("all weights are trained")
    else:
        run.lacks("only full fine-tuning and LoRA are supported")


def _set_loss(value: Any, run: Translation) -> None:
    if value in _LOSSES:
        run.set("pref_loss", value)
    else:
        run.lacks(f"there is no loss {value}")


def _set_dataset(target: str) -> Any:
    def function(value: Any, run: Translation) -> None:
        names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
        directory = str(run.get("dataset_dir", "data"))
        known = _dataset_info(directory)
        files = [_file(name, directory, known.get(name)) for name in names]
        run.set(target, files[0] if len(files) == 1 else files)
        if not all(name in known for name in names):
            run.note(f"{directory}/dataset_info.json is not here, so the file name is a guess; check it")
        for columns in (known[name].get("columns", {}) for name in names if name in known):
            for ours in ("prompt", "chosen", "rejected"):
                if ours in columns and target == FILES:
                    run.set(f"{ours}_key", columns[ours])

    return function


def _dataset_info(directory: str) -> dict[str, dict[str, Any]]:
    try:
        values = json.loads(Path(directory, "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _file(name: str, directory: str, info: Mapping[str, Any] | None) -> str:
    if info is None:
        return f"{directory}/{name}.json"
    if hub := info.get("hf_hub_url") or info.get("ms_hub_url"):
        return source_name(hub, info.get("split"), info.get("subset"))
    return f"{directory}/{info.get('file_name', name)}"


def _set_cutoff(value: Any, run: Translation) -> None:
    run.set("sequence_length", value)
    run.set(f"{DATA}truncation", "response_end")
    run.differs("LLaMA-Factory cuts prompt and response in proportion; here the end of the responses is cut")


def _set_checkpointing(value: Any, run: Translation) -> None:
    run.set(f"{TRAINING}gradient_checkpointing", not value)


def _set_attention(value: Any, run: Translation) -> None:
    if value in _ATTENTION:
        run.set(f"{MODEL}attn_implementation", _ATTENTION[value])
    else:
        run.ignore("chosen automatically")


def _set_pure_bf16(value: Any, run: Translation) -> None:
    if value:
        run.set(f"{MODEL}dtype", "bf16")
        run.set(f"{MODEL}master_dtype", "bf16")
    else:
        run.ignore("fp32 master weights")


def _set_pissa(value: Any, run: Translation) -> None:
    if value:
        iterations = run.get("pissa_iter", 16)
        run.set(f"{MODEL}lora_init", "pissa" if iterations == -1 else f"pissa_niter_{int(iterations)}")
    else:
        run.ignore("off")


_OWN: dict[str, Rule] = {
    "stage": by(_set_stage, note="dpo; KTO and the other stages have no equivalent"),
    "model_name_or_path": to("pretrain"),
    "pref_loss": by(_set_loss, "pref_loss"),
    "pref_beta": to("beta"),
    "pref_ftx": by(set_if_positive("rpo_alpha"), "rpo_alpha"),
    "simpo_gamma": by(set_if_loss("gamma", "simpo"), "gamma"),
    "dpo_label_smoothing": by(set_if_loss("label_smoothing", "sigmoid"), "label_smoothing"),
    "pref_bco_weight": lacks("sigmoid plus BCO: use a pref_loss mapping of sigmoid and bco_pair", 0.0),
    "ld_alpha": to("ld_alpha", "LLaMA-Factory weighs the policy's tokens only, here the reference's too", differs=True),
    "ref_model": to("reference.model_args.model_name_or_path"),
    "ref_model_adapters": planned("adapter"),
    "ref_model_quantization_bit": planned("quantization"),
    "finetuning_type": by(_set_tuning, f"{MODEL}lora_rank", note="full or lora"),
    "lora_rank": by(if_lora(_is_lora, f"{MODEL}lora_rank"), f"{MODEL}lora_rank"),
    "lora_alpha": by(
        if_lora(_is_lora, f"{MODEL}lora_alpha", lora_alpha("use_rslora", "lora_rank")), f"{MODEL}lora_alpha"
    ),
    "lora_dropout": by(if_lora(_is_lora, f"{MODEL}lora_dropout"), f"{MODEL}lora_dropout"),
    "lora_target": by(if_lora(_is_lora, f"{MODEL}lora_target", lora_targets), f"{MODEL}lora_target"),
    "use_rslora": part_of("lora_alpha", f"{MODEL}lora_alpha"),
    "use_dora": planned("dora"),
    "additional_target": planned("trained_modules"),
    "adapter_name_or_path": adapter(),
    "pissa_init": by(_set_pissa, f"{MODEL}lora_init"),
    "pissa_iter": part_of("pissa_init", f"{MODEL}lora_init"),
    "quantization_bit": planned("quantization"),
    "trust_remote_code": to(f"{MODEL}trust_remote_code"),
    "flash_attn": by(_set_attention, f"{MODEL}attn_implementation"),
    "disable_gradient_checkpointing": by(_set_checkpointing, f"{TRAINING}gradient_checkpointing"),
    "pure_bf16": by(_set_pure_bf16, f"{MODEL}dtype", f"{MODEL}master_dtype"),
    "model_revision": planned("revision", "main"),
    "moe_aux_loss_coef": planned("moe_aux_loss", 0.0),
    "rope_scaling": lacks("the positions of the model cannot be scaled; set rope_scaling in its config.json"),
    "dataset": by(_set_dataset(FILES), FILES, "prompt_key", "chosen_key", "rejected_key"),
    "eval_dataset": by(_set_dataset(VALIDATION_FILES), VALIDATION_FILES),
    "dataset_dir": part_of("dataset", FILES),
    "cutoff_len": by(_set_cutoff, "sequence_length", f"{DATA}truncation"),
    "template": template(),
    "enable_thinking": template_argument("enable_thinking"),
    "preserve_thinking": template_argument("preserve_thinking"),
    "default_system": planned("system_prompt"),
    "val_size": by(set_split, VALIDATION_SPLIT),
    "max_samples": planned("max_samples"),
    "mix_strategy": planned("mixing", "concat"),
    "interleave_probs": planned("mixing"),
    **drop("LLaMA-Factory reads it in SFT only", "train_on_prompt"),
    "preprocessing_num_workers": to(f"{DATA}preprocessing_num_workers"),
    "disable_shuffling": lacks("pairs are shuffled every epoch"),
    "early_stopping_steps": lacks("a run ends after max_steps or num_train_epochs"),
    "loraplus_lr_ratio": lacks("all parameters have one learning rate"),
    **lack(
        "the tokenizer's vocabulary cannot be changed",
        "add_tokens add_special_tokens resize_vocab new_special_tokens_config",
    ),
    **lack("AdamW is the only optimizer", "use_galore use_apollo use_badam use_adam_mini use_muon use_llama_pro"),
    **lack("the architecture cannot be changed", "shift_attn mixture_of_depths train_from_scratch fp8"),
    **lack("the loss of supervised stages", "use_dft_loss use_asft_loss use_eaft_loss"),
    **lack("parameters cannot be frozen", {"freeze_language_model": False}),
    **drop("used with another tuner", "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules"),
    **drop("used with LoRA+ or PiSSA", "loraplus_lr_embedding pissa_convert create_new_adapter"),
    **drop(
        "images are not supported",
        "freeze_vision_tower freeze_multi_modal_projector media_dir image_* video_* audio_* crop_to_patches "
        "use_audio_in_video",
    ),
    **drop(
        "used with quantization",
        "quantization_method quantization_type double_quantization quantization_device_map",
    ),
    **drop("used by KTO", "kto_chosen_weight kto_rejected_weight"),
    **drop(
        "used by PPO",
        "ppo_epochs ppo_target ppo_buffer_size ppo_score_norm ppo_whiten_rewards reward_model "
        "reward_model_adapters reward_model_type reward_model_quantization_bit",
    ),
    **drop("rows are packed in any case; numbers do not change", "packing neat_packing block_diag_attn"),
    **drop("only the final response is scored", "mask_history"),
    **drop(
        "loading; numbers do not change",
        "low_cpu_mem_usage use_fast_tokenizer split_special_tokens cache_dir hf_hub_token ms_hub_token om_hub_token",
    ),
    **drop(
        "kernels; numbers change by rounding only",
        "use_unsloth use_unsloth_gc enable_liger_kernel upcast_layernorm upcast_lmhead_output use_reentrant_gc "
        "use_v1_kernels fp8_backend compute_dtype fp8_enable_fsdp_float8_all_gather",
    ),
    **drop("all sources except JSON lists are streamed", "streaming buffer_size preprocessing_batch_size"),
    **drop("prepared data is cached by its content", "overwrite_cache tokenized_path data_shared_file_system"),
    **drop(
        "plots; metrics.jsonl holds every metric",
        "plot_loss compute_accuracy use_swanlab include_effective_tokens_per_second print_param_status",
    ),
    **drop("evaluation sets are joined", "eval_on_each_dataset"),
    **drop("padding is not scored", "ignore_pad_token_for_loss"),
    **drop("set actor_train.device_mapping", "ray_num_workers ray_init_kwargs ray_run_name use_ray"),
    **drop("tool calls follow the tokenizer's template", "tool_format"),
    **drop("inference only", "infer_backend infer_dtype offload_folder use_kv_cache init_special_tokens"),
    **drop(
        "another engine",
        "use_mca use_megatron_bridge use_hyper_parallel use_kt kt_* megatron_bridge_args hyper_parallel_* "
        "master_addr master_port device_map",
    ),
    **drop("used with another optimizer", "galore_* apollo_* badam_*"),
    **drop("used with another tuner or loss", "oft_* module_dropout asft_alpha eaft_alpha adapter_folder"),
    **drop("inference and export", "vllm_* sglang_* export_* eval_num_beams model_max_length"),
    **drop("trackers have no such setting", "swanlab_* profiler_* enable_torch_profiler profile_modules"),
}


TABLE: dict[str, Rule] = {**_OWN, **huggingface.TABLE, **_OWN}


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    lora = {"lora_rank": 8, "lora_target": "all"} if given.get("finetuning_type", "lora") == "lora" else {}
    simpo = {"simpo_gamma": 0.5} if given.get("pref_loss") == "simpo" else {}
    return {
        "pref_loss": "sigmoid",
        "pref_beta": 0.1,
        **simpo,
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "num_train_epochs": 3.0,
        "per_device_train_batch_size": 8,
        "cutoff_len": 2048,
        "disable_gradient_checkpointing": False,
        "logging_steps": 500,
        "save_steps": 500,
        **lora,
    }


LLAMA_FACTORY = Dialect(
    name="llama-factory",
    title="LLaMA-Factory",
    table=TABLE,
    defaults=_defaults,
    marks=(frozenset({"stage", "model_name_or_path"}), frozenset({"pref_beta"}), frozenset({"finetuning_type"})),
    programs=("llamafactory-cli train", "src/train.py"),
)
