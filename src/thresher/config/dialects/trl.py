"""TRL (`trl dpo`), and alignment-handbook, which adds its own data sets to TRL's keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from thresher.config.dialects import huggingface
from thresher.config.dialects.huggingface import set_weight_dtype, source_name
from thresher.config.dialects.losses import set_if_loss, set_if_positive, set_label_smoothing, set_losses
from thresher.config.dialects.rules import (
    DATA,
    FILES,
    MODEL,
    VALIDATION_FILES,
    VALIDATION_SPLIT,
    Function,
    Rule,
    by,
    drop,
    lacks,
    part_of,
    planned,
    samples,
    set_reference_free,
    set_split,
    to,
)
from thresher.config.dialects.translation import Dialect, Translation

_TRUNCATION = {"keep_start": "response_end", "keep_end": "prompt_start"}


def set_files(run: Translation, train: list[str], test: list[str]) -> None:
    """Set the sources; validation data only if the config evaluates."""
    run.set(FILES, train[0] if len(train) == 1 else train)
    run.differs(
        "TRL trains on rows of plain strings as raw text, here they get the chat template: set "
        f"{DATA}template=raw for such rows; conversations are the same"
    )
    if test and run.get("eval_strategy", run.get("evaluation_strategy", "no")) != "no":
        run.set(VALIDATION_FILES, test[0] if len(test) == 1 else test)


def _set_dataset(value: Any, run: Translation) -> None:
    config = run.get("dataset_config")
    train, test = run.get("dataset_train_split", "train"), run.get("dataset_test_split", "test")
    set_files(run, [source_name(value, train, config)], [source_name(value, test, config)])


def _set_mixture(value: Any, run: Translation) -> None:
    """Read a list of data sets: alignment-handbook's `dataset_mixture` or TRL's `datasets`."""
    parts = value.get("datasets", []) if isinstance(value, Mapping) else value
    names = [
        source_name(part.get("id") or part.get("path"), part.get("split"), part.get("config") or part.get("name"))
        for part in parts
    ]
    set_files(run, names, [])
    if any((part.get("weight") or part.get("fraction") or 1.0) != 1.0 for part in parts):
        run.plan("mixing", [part.get("weight", 1.0) for part in parts])
    held_out = value.get("test_split_size") if isinstance(value, Mapping) else run.get("test_split_size")
    if held_out and run.get("eval_strategy", "no") != "no":
        set_split(held_out, run)


def _set_mixer(value: Any, run: Translation) -> None:
    """Read alignment-handbook's `dataset_mixer`, a mapping from name to fraction, with `dataset_splits`."""
    splits = run.get("dataset_splits") or ["train"]
    train = [source_name(name, split) for name in value for split in splits if not split.startswith("test")]
    test = [source_name(name, split) for name in value for split in splits if split.startswith("test")]
    set_files(run, train, test)
    if any(fraction != 1.0 for fraction in value.values()):
        run.plan("mixing", list(value.values()))


def if_lora(is_lora: Any, target: str, change: Any = lambda value, run: value) -> Function:
    """Make a function that sets a LoRA key if the config trains adapters."""

    def function(value: Any, run: Translation) -> None:
        if is_lora(run):
            run.set(target, change(value, run))
        else:
            run.ignore("LoRA is off")

    return function


def lora_alpha(rslora_key: str, rank_key: str) -> Any:
    """Make a function for alpha: rsLoRA scales by alpha / sqrt(rank), LoRA by alpha / rank."""

    def change(value: Any, run: Translation) -> float:
        if not run.get(rslora_key):
            return float(value) if isinstance(value, float) and value % 1 else int(value)
        run.note("rsLoRA scales by alpha / sqrt(rank), so alpha is multiplied by sqrt(rank)")
        return float(value) * math.sqrt(float(run.get(rank_key)))

    return change


def lora_targets(value: Any, run: Translation) -> list[str]:
    """Read the names of modules: a list, one name, or names joined with commas; `all` means all-linear."""
    if run.entries[-1].is_default and isinstance(value, list):
        run.note("PEFT's default for Llama, Mistral and Qwen; check it for other models")
    names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
    return ["all-linear" if name in ("all", "all-linear", "all_linear", "ALL") else name for name in names]


def _is_lora(run: Translation) -> bool:
    return bool(run.get("use_peft"))


def _set_truncation(value: Any, run: Translation) -> None:
    run.set(f"{DATA}truncation", _TRUNCATION.get(str(value), "response_end"))
    if value == "keep_end":
        run.differs("TRL keeps the last max_length tokens; here the start of the prompt is cut, never a response")


def _set_template(value: Any, run: Translation) -> None:
    if str(value).endswith((".jinja", ".j2")):
        run.set(f"{DATA}template", value)
    else:
        run.lacks("write the template to a file and set data_args.template to its path")


def _set_sync(value: Any, run: Translation) -> None:
    if value:
        run.set("reference.sync_steps", int(run.get("ref_model_sync_steps", 512)))
        run.set("reference.sync_alpha", run.get("ref_model_mixup_alpha", 0.6))
    else:
        run.ignore("the reference is frozen")


def _set_model_arguments(value: Any, run: Translation) -> None:
    """Read the arguments of from_pretrained that have a setting here."""
    value = json.loads(value) if isinstance(value, str) else value
    arguments = {name: each for name, each in value.items() if each is not None}
    dtype = arguments.pop("dtype", arguments.pop("torch_dtype", None))
    if dtype not in (None, "auto"):
        set_weight_dtype(lambda run: not _is_lora(run))(dtype, run)
    for name, default in (("attn_implementation", None), ("revision", "main"), ("trust_remote_code", False)):
        if arguments.pop(name, default) != default:
            run.set(f"{MODEL}{name}", value[name])
    others = arguments.keys() - {"use_cache", "device_map", "low_cpu_mem_usage"}
    if others:
        run.lacks(f"{', '.join(sorted(others))} of the model's class cannot be set")
    elif not run.entries[-1].targets and run.entries[-1].outcome == "translated":
        run.ignore("the defaults")


_METHOD: dict[str, Rule] = {
    "model_name_or_path": to("pretrain"),
    "loss_type": by(set_losses("loss_weights"), "pref_loss", "label_smoothing"),
    "loss_weights": part_of("loss_type", "pref_loss"),
    "beta": to("beta"),
    "label_smoothing": by(
        set_label_smoothing, "label_smoothing", note="not with sigmoid, where TRL 1.x ignores it and we do not"
    ),
    "discopop_tau": by(set_if_loss("discopop_tau", "discopop"), "discopop_tau"),
    "rpo_alpha": by(set_if_positive("rpo_alpha"), "rpo_alpha"),
    "ld_alpha": to("ld_alpha"),
    "f_divergence_type": to("f_divergence_type"),
    "f_alpha_divergence_coef": by(
        lambda v, run: (
            run.set("f_alpha_divergence_coef", v)
            if run.get("f_divergence_type") == "alpha_divergence"
            else run.ignore("only for alpha_divergence")
        ),
        "f_alpha_divergence_coef",
    ),
    "use_weighting": to("use_wpo"),
    "generate_during_eval": samples(),
    "reference_free": by(set_reference_free, "reference.mode"),
    "sync_ref_model": by(_set_sync, "reference.sync_steps", "reference.sync_alpha"),
    "ref_model_sync_steps": part_of("sync_ref_model", "reference.sync_steps"),
    "ref_model_mixup_alpha": part_of("sync_ref_model", "reference.sync_alpha"),
    "precompute_ref_log_probs": by(
        lambda v, run: run.set("reference.mode", "precompute") if v else run.ignore("the mode does not change numbers"),
        "reference.mode",
    ),
    "precompute_ref_batch_size": to("reference.infer_batch_size"),
}
_MODEL: dict[str, Rule] = {
    "use_peft": Rule(
        (f"{MODEL}lora_rank",),
        "with `lora_r`",
        lambda v, run: run.use(f"{MODEL}lora_rank") if v else run.ignore("LoRA is off"),
    ),
    "lora_r": by(if_lora(_is_lora, f"{MODEL}lora_rank"), f"{MODEL}lora_rank"),
    "lora_alpha": by(if_lora(_is_lora, f"{MODEL}lora_alpha", lora_alpha("use_rslora", "lora_r")), f"{MODEL}lora_alpha"),
    "lora_dropout": by(if_lora(_is_lora, f"{MODEL}lora_dropout"), f"{MODEL}lora_dropout"),
    "lora_target_modules": by(if_lora(_is_lora, f"{MODEL}lora_target", lora_targets), f"{MODEL}lora_target"),
    "use_rslora": part_of("lora_alpha", f"{MODEL}lora_alpha"),
    "use_dora": planned("dora"),
    "lora_target_parameters": lacks("adapters are on modules, not on parameters"),
    "lora_modules_to_save": planned("trained_modules"),
    "load_in_8bit": planned("quantization"),
    "load_in_4bit": planned("quantization"),
    "dtype": by(set_weight_dtype(lambda run: not _is_lora(run)), f"{MODEL}dtype", f"{MODEL}master_dtype"),
    "torch_dtype": by(set_weight_dtype(lambda run: not _is_lora(run)), f"{MODEL}dtype", f"{MODEL}master_dtype"),
    "attn_implementation": to(f"{MODEL}attn_implementation"),
    "trust_remote_code": to(f"{MODEL}trust_remote_code"),
    "model_revision": planned("revision", "main"),
    "pad_token": to(f"{MODEL}pad_token"),
    "router_aux_loss_coef": planned("moe_aux_loss", 0.0),
    "model_init_kwargs": by(
        _set_model_arguments,
        *(f"{MODEL}{name}" for name in ("dtype", "master_dtype", "attn_implementation", "revision")),
        note="dtype, attn_implementation, revision and trust_remote_code",
    ),
    "ref_model_init_kwargs": lacks("arguments of the model's class cannot be set"),
    "disable_dropout": by(
        lambda v, run: (
            run.ignore("dropout is always off")
            if v
            else run.differs("dropout is always off, so a model whose config has dropout trains without it")
        ),
        note="dropout is always off",
    ),
    "model_adapter_name": planned("adapter"),
    "ref_adapter_name": planned("adapter"),
    **drop("used with load_in_4bit", "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage"),
    **drop("all models are causal language models", "lora_task_type is_encoder_decoder"),
    **drop("memory; numbers do not change", "activation_offloading force_use_ref_model use_logits_to_keep"),
}
_DATA: dict[str, Rule] = {
    "dataset_name": by(_set_dataset, FILES, VALIDATION_FILES),
    "dataset_config": part_of("dataset_name", FILES),
    "dataset_train_split": part_of("dataset_name", FILES),
    "dataset_test_split": part_of("dataset_name", VALIDATION_FILES),
    "datasets": by(_set_mixture, FILES, VALIDATION_SPLIT),
    "dataset_mixture": by(_set_mixture, FILES, VALIDATION_SPLIT),
    "dataset_mixer": by(_set_mixer, FILES, VALIDATION_FILES),
    "dataset_splits": part_of("dataset_mixer", FILES),
    "test_split_size": part_of("datasets", VALIDATION_SPLIT),
    "max_length": to("sequence_length"),
    "truncation_mode": by(_set_truncation, f"{DATA}truncation"),
    "chat_template": by(_set_template, f"{DATA}template"),
    "chat_template_path": by(_set_template, f"{DATA}template"),
    "preprocessing_num_workers": to(f"{DATA}preprocessing_num_workers"),
    "max_prompt_length": lacks("prompt and response share sequence_length; prompts have no limit"),
    "max_completion_length": lacks("prompt and response share sequence_length; responses have no limit"),
    "tools": lacks("add a `tools` column to the rows"),
    **drop("all sources except JSON lists are streamed", "dataset_streaming streaming"),
    **drop("rows are packed unless `layout: padded`; numbers do not change", "padding_free pad_to_multiple_of"),
    **drop("padding is not scored", "label_pad_token_id padding_value ignore_bias_buffers"),
    **drop("the loss is computed in chunks", "use_liger_loss"),
}

TABLE: dict[str, Rule] = {**_METHOD, **_MODEL, **_DATA, **huggingface.TABLE}


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of TRL 1.16 that differ from ours."""
    lora = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
    return {
        "loss_type": ["sigmoid"],
        "beta": 0.1,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
        "num_train_epochs": 3.0,
        "per_device_train_batch_size": 8,
        "gradient_checkpointing": True,
        "bf16": not given.get("fp16"),
        "max_length": 1024,
        "truncation_mode": "keep_start",
        "logging_steps": 10,
        "save_steps": 500,
        **(lora if given.get("use_peft") else {}),
    }


TRL = Dialect(
    name="trl",
    title="TRL",
    table=TABLE,
    defaults=_defaults,
    marks=(
        frozenset({"dataset_mixture"}),
        frozenset({"dataset_mixer", "dataset_splits"}),
        frozenset({"model_name_or_path", "dataset_name"}),
        frozenset({"model_name_or_path", "loss_type"}),
        frozenset({"model_name_or_path", "learning_rate"}),
        frozenset({"model_name_or_path", "datasets"}),
    ),
    programs=("trl dpo", "scripts/dpo.py"),
)
