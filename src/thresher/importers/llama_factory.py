"""LLaMA-Factory (`stage: dpo`, `kto` and `rm`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thresher.importers import huggingface
from thresher.importers import rules as r
from thresher.importers.engines import read_json
from thresher.importers.translation import DATA, EVAL_FILES, EVAL_SPLIT, FILES, MODEL, TRAINING, Translation

_LOSSES = ("sigmoid", "hinge", "ipo", "orpo", "simpo")
_ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}


def _is_lora(run: Translation) -> bool:
    return bool(run.get("finetuning_type", "lora") == "lora")


def _set_stage(value: Any, run: Translation) -> None:
    if value == "dpo":
        run.ignore("preference training")
    elif value == "kto":
        r.set_method("kto", run)
    elif value == "rm":
        r.set_method("bradley_terry", run)
        run.note("LLaMA-Factory's head has dropout, here it has none")
    else:
        run.lacks(r.OTHER_METHOD)


def _set_loss(value: Any, run: Translation) -> None:
    if run.get("stage", "dpo") != "dpo":
        run.ignore("only in stage dpo")
    elif value in _LOSSES:
        run.set("pref_loss", value)
    else:
        run.lacks(f"there is no loss {value}")


def _set_ftx(value: Any, run: Translation) -> None:
    if run.get("stage", "dpo") == "kto":
        run.lacks("labelled responses have no NLL term of this weight; use pref_loss: {kto: 1, sft: WEIGHT}")
    else:
        run.set("rpo_alpha", value)


def _set_dataset(target: str) -> r.Function:
    def function(value: Any, run: Translation) -> None:
        names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
        directory = str(run.get("dataset_dir", "data"))
        known = read_json(str(Path(directory, "dataset_info.json"))) or {}
        files = [_file(name, directory, known.get(name)) for name in names]
        r.set_sources(run, target, files)
        if not all(name in known for name in names):
            run.note(f"{directory}/dataset_info.json is not here, so the file name is a guess; check it")
        for columns in (known[name].get("columns", {}) for name in names if name in known):
            for ours in ("prompt", "chosen", "rejected"):
                if ours in columns and target == FILES:
                    run.set(f"{ours}_key", columns[ours])

    return function


def _file(name: str, directory: str, info: Mapping[str, Any] | None) -> str:
    if info is None:
        return f"{directory}/{name}.json"
    if hub := info.get("hf_hub_url") or info.get("ms_hub_url"):
        return r.source_name(hub, info.get("split"), info.get("subset"))
    return f"{directory}/{info.get('file_name', name)}"


def _set_cutoff(value: Any, run: Translation) -> None:
    run.set("sequence_length", value)
    run.set(f"{DATA}truncation", "response_end")
    run.differs("LLaMA-Factory shortens the prompt, the responses or both; here the end of the responses is cut")


def _set_pure_bf16(_: Any, run: Translation) -> None:
    run.set(f"{MODEL}dtype", "bf16")
    run.set(f"{MODEL}master_dtype", "bf16")


def _set_pissa(_: Any, run: Translation) -> None:
    iterations = run.get("pissa_iter", 16)
    run.set(f"{MODEL}lora_init", "pissa" if iterations == -1 else f"pissa_niter_{int(iterations)}")


_OWN: r.Table = {
    "stage": r.by(_set_stage, "pref_loss", note="dpo, kto and rm; the other stages have no equivalent"),
    "kto_chosen_weight": r.if_loss("desirable_weight", "kto"),
    "kto_rejected_weight": r.if_loss("undesirable_weight", "kto"),
    "model_name_or_path": r.to("pretrain"),
    "pref_loss": r.by(_set_loss, "pref_loss"),
    "pref_beta": r.to("beta"),
    "pref_ftx": r.by(_set_ftx, "rpo_alpha", off="off"),
    "simpo_gamma": r.if_loss("gamma", "simpo"),
    "dpo_label_smoothing": r.if_loss("label_smoothing", "sigmoid"),
    "pref_bco_weight": r.lacks("sigmoid plus BCO: use a pref_loss mapping of sigmoid and bco_pair", 0.0),
    "ld_alpha": r.to(
        "ld_alpha", "LLaMA-Factory weighs the policy's tokens only, here the reference's too", differs=True
    ),
    "ref_model": r.to("reference.model_args.model_name_or_path"),
    "ref_model_adapters": r.lacks(r.REFERENCE_ADAPTER),
    "ref_model_quantization_bit": r.lacks("the reference is quantized like the policy"),
    **r.quantization(_is_lora, {"quantization_bit": None}, "quantization_type", "double_quantization", is_double=True),
    "quantization_method": r.lacks(r.QUANTIZED, "bnb", "bitsandbytes"),
    "finetuning_type": r.lora_switch("full or lora", full="full"),
    **r.lora_rules(_is_lora, "lora_rank", targets="lora_target", rslora="use_rslora"),
    "use_dora": r.lacks(r.DORA),
    "additional_target": r.lacks(r.TRAINED_MODULES),
    "adapter_name_or_path": r.ADAPTER,
    "pissa_init": r.by(_set_pissa, f"{MODEL}lora_init", off="off"),
    "pissa_iter": r.part_of("pissa_init", f"{MODEL}lora_init"),
    **r.kept(MODEL, "trust_remote_code"),
    "flash_attn": r.choice(f"{MODEL}attn_implementation", _ATTENTION, ignore="chosen automatically"),
    "disable_gradient_checkpointing": r.converted(f"{TRAINING}gradient_checkpointing", lambda value: not value),
    "pure_bf16": r.by(_set_pure_bf16, f"{MODEL}dtype", f"{MODEL}master_dtype", off="fp32 master weights"),
    "model_revision": r.to(f"{MODEL}revision", neutral=("main",)),
    "moe_aux_loss_coef": r.to(f"{MODEL}moe_aux_loss_coef", neutral=(0.0,)),
    "rope_scaling": r.lacks("the positions of the model cannot be scaled; set rope_scaling in its config.json"),
    "dataset": r.by(_set_dataset(FILES), FILES, "prompt_key", "chosen_key", "rejected_key"),
    "eval_dataset": r.by(_set_dataset(EVAL_FILES), EVAL_FILES),
    "dataset_dir": r.part_of("dataset", FILES),
    "cutoff_len": r.by(_set_cutoff, "sequence_length", f"{DATA}truncation"),
    "template": r.template(),
    **{name: r.template_argument(name) for name in ("enable_thinking", "preserve_thinking")},
    "default_system": r.to(f"{DATA}system_prompt"),
    "val_size": r.by(r.set_split, EVAL_SPLIT),
    **r.kept(DATA, "max_samples preprocessing_num_workers"),
    "mix_strategy": r.lacks(r.MIXED, "concat"),
    "interleave_probs": r.lacks(r.MIXED),
    "disable_shuffling": r.lacks(r.SHUFFLED),
    "early_stopping_steps": r.lacks("a run ends after max_steps or num_train_epochs"),
    "loraplus_lr_ratio": r.lacks(r.ONE_RATE),
    **r.lack(r.VOCABULARY, "add_tokens add_special_tokens resize_vocab new_special_tokens_config"),
    **r.lack(r.ONE_OPTIMIZER, "use_galore use_apollo use_badam use_adam_mini use_muon use_llama_pro"),
    **r.lack("the architecture cannot be changed", "shift_attn mixture_of_depths train_from_scratch fp8"),
    **r.lack("the loss of supervised stages", "use_dft_loss use_asft_loss use_eaft_loss"),
    "freeze_language_model": r.lacks(r.FROZEN),
    **r.drop("tool calls follow the tokenizer's template", "tool_format"),
    **r.drop("set actor_train.device_mapping", "ray_num_workers use_ray"),
    **r.drop("set actor_train.strategy_args.strategy_name", "use_mca use_megatron_bridge use_hyper_parallel use_kt"),
}
TABLE: r.Table = {**_OWN, **huggingface.TABLE, **_OWN}
# options of other stages, tuners, optimizers and engines besides loading, kernels, packing, caches and trackers
NEUTRAL = f"""{huggingface.NEUTRAL}
adapter_folder apollo_* asft_alpha audio_* badam_* block_diag_attn buffer_size cache_dir compute_accuracy compute_dtype
create_new_adapter crop_to_patches data_shared_file_system device_map eaft_alpha
enable_liger_kernel enable_torch_profiler eval_num_beams eval_on_each_dataset export_* fp8_* freeze_extra_modules
freeze_multi_modal_projector freeze_trainable_layers freeze_trainable_modules freeze_vision_tower galore_* hf_hub_token
hyper_parallel_* ignore_pad_token_for_loss image_* include_effective_tokens_per_second infer_backend infer_dtype
init_special_tokens kt_* loraplus_lr_embedding low_cpu_mem_usage mask_history
master_addr master_port media_dir megatron_bridge_args model_max_length module_dropout ms_hub_token neat_packing
offload_folder oft_* om_hub_token overwrite_cache packing pissa_convert plot_loss ppo_* preprocessing_batch_size
print_param_status profile_modules profiler_* quantization_device_map
ray_init_kwargs ray_run_name reward_model reward_model_* sglang_* split_special_tokens streaming swanlab_*
tokenized_path train_on_prompt upcast_layernorm upcast_lmhead_output use_audio_in_video use_fast_tokenizer use_kv_cache
use_reentrant_gc use_swanlab use_unsloth use_unsloth_gc use_v1_kernels video_* vllm_*
"""


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    lora = {"lora_rank": 8, "lora_target": "all"} if given.get("finetuning_type", "lora") == "lora" else {}
    simpo = {"simpo_gamma": 0.5} if given.get("pref_loss") == "simpo" else {}
    loss = {"pref_loss": "sigmoid", "pref_beta": 0.1}
    rate = {"learning_rate": 5e-5, "lr_scheduler_type": "linear"}
    memory = {"cutoff_len": 2048, "disable_gradient_checkpointing": False}
    steps = {"num_train_epochs": 3.0, "per_device_train_batch_size": 8, "logging_steps": 500, "save_steps": 500}
    return {**loss, **simpo, **rate, **memory, **steps, **lora}
