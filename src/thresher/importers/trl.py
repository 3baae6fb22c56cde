"""TRL (`trl dpo`, `kto`, `reward`), and alignment-handbook, which adds its own datasets to TRL's keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from thresher.importers import huggingface, mixtures
from thresher.importers import rules as r
from thresher.importers.translation import DATA, EVAL_FILES, EVAL_SPLIT, FILES, MODEL, SOURCES, Translation

_TRUNCATION = {"keep_start": "response_end", "keep_end": "prompt_start"}


def _set_data(run: Translation, train: list[mixtures.Dataset], test: list[mixtures.Dataset], **how: Any) -> None:
    """Set the datasets; validation data only if the config evaluates."""
    mixtures.set_datasets(run, FILES, train, **how)
    run.differs(
        "TRL trains on rows of plain strings as raw text, here they get the chat template: set "
        f"{DATA}template=raw for such rows; conversations are the same"
    )
    if test and run.get("eval_strategy", run.get("evaluation_strategy", "no")) != "no":
        mixtures.set_datasets(run, EVAL_FILES, test)


def _set_dataset(value: Any, run: Translation) -> None:
    config = run.get("dataset_config")
    train, test = run.get("dataset_train_split", "train"), run.get("dataset_test_split", "test")
    _set_data(run, *([mixtures.Dataset(mixtures.named_files(value, None, split, config))] for split in (train, test)))


def _set_mixture(value: Any, run: Translation) -> None:
    """Read a list of datasets: alignment-handbook's `dataset_mixture` or TRL's `datasets`."""
    parts = value.get("datasets", []) if isinstance(value, Mapping) else value
    datasets = [
        mixtures.Dataset(
            mixtures.named_files(
                part.get("id") or part["path"],
                part.get("data_files"),
                part.get("split"),
                part.get("config") or part.get("name"),
            ),
            weight=1.0 if part.get("weight") is None else float(part["weight"]),
        )
        for part in parts
    ]
    has_fractions = len(parts) > 1 and any(part.get("fraction") for part in parts)
    _set_data(run, datasets, [], is_named=has_fractions)
    if has_fractions:
        run.lacks(
            "TRL's fractions are shares of the mixture, which depend on the numbers of rows; set `weight`, a share of "
            f"the dataset, of each in {SOURCES}"
        )
    if any(part.get("data_dir") for part in parts):
        run.lacks("name the files of data_dir in file_name")
    held_out = value.get("test_split_size") if isinstance(value, Mapping) else run.get("test_split_size")
    if held_out and run.get("eval_strategy", "no") != "no":
        r.set_split(held_out, run)


def _set_mixer(value: Any, run: Translation) -> None:
    """Read alignment-handbook's `dataset_mixer`, a mapping from name to share, with `dataset_splits`."""
    configs = run.get("dataset_configs") or [None] * len(value)
    train: list[mixtures.Dataset] = []
    test: list[mixtures.Dataset] = []
    for (name, share), config in zip(value.items(), configs, strict=True):
        for split in run.get("dataset_splits") or ["train"]:
            files = mixtures.named_files(name, None, split, config)
            if split.startswith("test"):
                test.append(mixtures.Dataset(files))
            else:
                train.append(mixtures.Dataset(files, weight=float(share)))
    _set_data(run, train, test, rows="the first rows")


def _set_rewards(value: Any, run: Translation) -> None:
    r.set_method("bradley_terry", run)
    if value:
        run.set("center_rewards_coefficient", value)


def _set_sampling(value: Any, run: Translation) -> None:
    if value == "random":
        run.ignore(r.SHUFFLED)
    elif value == "sequential" and not {"kto", "apo_zero_unpaired"}.isdisjoint(run.losses):
        run.differs(r.SHUFFLED)
    else:
        run.lacks(r.SHUFFLED)


def _is_lora(run: Translation) -> bool:
    return bool(run.get("use_peft"))


_set_weight_dtype = huggingface.set_weight_dtype(lambda run: not _is_lora(run))


def _set_truncation(value: Any, run: Translation) -> None:
    run.set(f"{DATA}truncation", _TRUNCATION.get(str(value), "response_end"))
    if value == "keep_end":
        run.differs("TRL keeps the last max_length tokens; here the start of the prompt is cut, never a response")


def _set_template(value: Any, run: Translation) -> None:
    if str(value).endswith((".jinja", ".j2")):
        run.set(f"{DATA}template", value)
    else:
        run.lacks(r.WRITE_TEMPLATE)


def _set_alpha(value: Any, run: Translation) -> None:
    if "alphapo" in run.losses:
        run.set("alphapo_alpha", value)
    elif value:
        run.lacks("only the reward of alphapo can be bent; set loss_type alphapo")
    else:
        run.ignore("off")


def _set_sync(_: Any, run: Translation) -> None:
    run.set("reference.sync_steps", int(run.get("ref_model_sync_steps", 512)))
    run.set("reference.sync_alpha", run.get("ref_model_mixup_alpha", 0.6))


def _set_model_arguments(value: Any, run: Translation) -> None:
    """Read the arguments of from_pretrained that have a setting here."""
    value = json.loads(value) if isinstance(value, str) else value
    arguments = {name: each for name, each in value.items() if each is not None}
    dtype = arguments.pop("dtype", arguments.pop("torch_dtype", None))
    if dtype not in (None, "auto"):
        _set_weight_dtype(dtype, run)
    for name, default in (("attn_implementation", None), ("revision", "main"), ("trust_remote_code", False)):
        if arguments.pop(name, default) != default:
            run.set(f"{MODEL}{name}", value[name])
    others = arguments.keys() - {"use_cache", "device_map", "low_cpu_mem_usage"}
    if others:
        run.lacks(f"{', '.join(sorted(others))} of the model's class cannot be set")
    elif not run.entries[-1].targets and run.entries[-1].outcome == "translated":
        run.ignore("the defaults")


TABLE: r.Table = {
    "model_name_or_path": r.to("pretrain"),
    "loss_type": r.losses("loss_weights"),
    "loss_weights": r.part_of("loss_type", "pref_loss"),
    **r.kept("", "beta ld_alpha f_divergence_type"),
    "label_smoothing": r.LABEL_SMOOTHING,
    "discopop_tau": r.if_loss("discopop_tau", "discopop"),
    "rpo_alpha": r.switch("rpo_alpha"),
    "f_alpha_divergence_coef": r.only_if(
        lambda run: run.get("f_divergence_type") == "alpha_divergence",
        "f_alpha_divergence_coef",
        "only for alpha_divergence",
    ),
    "use_weighting": r.to("use_wpo"),
    # of CPOConfig
    "simpo_gamma": r.if_loss("gamma", "simpo", "alphapo"),
    "cpo_alpha": r.CPO_ALPHA,
    "alpha": r.by(_set_alpha, "alphapo_alpha"),
    # of KTOConfig and RewardConfig
    **r.LABEL_WEIGHTS,
    "center_rewards_coefficient": r.by(_set_rewards, "pref_loss", "center_rewards_coefficient"),
    "eos_token": r.lacks("set eos_token in the tokenizer's files"),
    "generate_during_eval": r.SAMPLES,
    "reference_free": r.switch("reference.mode", "none", off="there is a reference"),
    "sync_ref_model": r.by(_set_sync, "reference.sync_steps", "reference.sync_alpha", off="the reference is frozen"),
    "ref_model_sync_steps": r.part_of("sync_ref_model", "reference.sync_steps"),
    "ref_model_mixup_alpha": r.part_of("sync_ref_model", "reference.sync_alpha"),
    "precompute_ref_log_probs": r.switch("reference.mode", "precompute", off="the mode does not change numbers"),
    "precompute_ref_batch_size": r.to("reference.infer_batch_size"),
    "use_peft": r.lora_switch("read with `lora_r`"),
    **r.lora_rules(
        _is_lora,
        "lora_r",
        targets="lora_target_modules",
        parameters="lora_target_parameters",
        rslora="use_rslora",
        dora="use_dora",
    ),
    "lora_modules_to_save": r.modules_to_save(_is_lora),
    **r.quantization(
        _is_lora,
        {"load_in_4bit": 4, "load_in_8bit": 8},
        "bnb_4bit_quant_type",
        "use_bnb_nested_quant",
        is_double=False,
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), r.by(_set_weight_dtype, f"{MODEL}dtype", f"{MODEL}master_dtype")),
    **r.kept(MODEL, "attn_implementation trust_remote_code pad_token"),
    "model_revision": r.to(f"{MODEL}revision", neutral=("main",)),
    "router_aux_loss_coef": r.to(f"{MODEL}moe_aux_loss_coef", neutral=(0.0,)),
    "model_init_kwargs": r.by(
        _set_model_arguments,
        *(
            f"{MODEL}{name}"
            for name in ("dtype", "master_dtype", "attn_implementation", "revision", "trust_remote_code")
        ),
    ),
    "ref_model_init_kwargs": r.lacks("arguments of the model's class cannot be set"),
    "disable_dropout": r.by(
        lambda value, run: (
            run.ignore("dropout is always off")
            if value
            else run.differs("dropout is always off, so a model whose config has dropout trains without it")
        ),
        note="dropout is always off",
    ),
    **r.lack(r.REFERENCE_ADAPTER, "model_adapter_name ref_adapter_name"),
    "dataset_name": r.by(_set_dataset, FILES, EVAL_FILES),
    "dataset_config": r.part_of("dataset_name", FILES),
    "dataset_train_split": r.part_of("dataset_name", FILES),
    "dataset_test_split": r.part_of("dataset_name", EVAL_FILES),
    **dict.fromkeys(("datasets", "dataset_mixture"), r.by(_set_mixture, FILES, SOURCES, EVAL_SPLIT)),
    "dataset_mixer": r.by(_set_mixer, FILES, SOURCES, EVAL_FILES),
    "dataset_splits": r.part_of("dataset_mixer", FILES),
    "dataset_configs": r.part_of("dataset_mixer", FILES),
    "test_split_size": r.part_of("datasets", EVAL_SPLIT),
    "max_length": r.to("sequence_length"),
    "truncation_mode": r.by(_set_truncation, f"{DATA}truncation"),
    **dict.fromkeys(("chat_template", "chat_template_path"), r.by(_set_template, f"{DATA}template")),
    **r.kept(DATA, "preprocessing_num_workers"),
    **r.lack("prompt and response share sequence_length", "max_prompt_length max_completion_length"),
    "tools": r.lacks("add a `tools` column to the rows"),
    **huggingface.TABLE,
    "train_sampling_strategy": r.by(_set_sampling, note=r.SHUFFLED),
}
# a key of KTOConfig and RewardConfig that tells them from DPOConfig, by their programs: `trl kto`
CLASSES: dict[str, dict[str, Any]] = {"kto": {"loss_type": "kto"}, "reward": {"center_rewards_coefficient": 0.0}}
NEUTRAL = f"""{huggingface.NEUTRAL}
activation_offloading bnb_4bit_quant_storage dataset_streaming force_use_ref_model ignore_bias_buffers
is_encoder_decoder label_pad_token_id lora_task_type pad_to_multiple_of padding_free padding_value streaming
use_liger_loss use_logits_to_keep
"""


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of TRL 1.16 that differ from ours."""
    lora = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
    loss: dict[str, Any] = {"loss_type": ["sigmoid"], "beta": 0.1}
    if given.get("loss_type") in ("simpo", "alphapo"):  # CPOTrainer, which sets cpo_alpha to 0 for alphapo
        loss |= {"simpo_gamma": 0.5, **({"cpo_alpha": 1.0} if given["loss_type"] == "simpo" else {"alpha": 0.0})}
    elif {"desirable_weight", "undesirable_weight"} & given.keys():
        loss["loss_type"] = "kto"
    rate = {"learning_rate": 1e-6, "lr_scheduler_type": "linear"}
    memory = {"gradient_checkpointing": True, "bf16": not given.get("fp16")}
    lengths = {"max_length": 1024, "truncation_mode": "keep_start"}
    if "center_rewards_coefficient" in given:  # RewardTrainer drops longer rows
        loss, rate["learning_rate"], lengths = {}, 1e-4, {"max_length": 1024}
    steps = {"num_train_epochs": 3.0, "per_device_train_batch_size": 8, "logging_steps": 10, "save_steps": 500}
    return {**loss, **rate, **memory, **lengths, **steps, **(lora if given.get("use_peft") else {})}
