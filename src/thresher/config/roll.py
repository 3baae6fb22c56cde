"""Keys of ROLL's configs that have another place, another form or no meaning here, for reading and for importing.

`translate` runs before validation. Every key that it changes gives one line that says what became of it, so that
nothing is ignored silently. Keys that mean the same in ROLL and here are not listed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from thresher.errors import UserError
from thresher.redact import redact

_POLICY, _REFERENCE = "actor_train", "reference"
_TRAINING = f"{_POLICY}.training_args"


class Moved(NamedTuple):
    """A key with another name or place here; `convert` makes our value of ROLL's, or None if it has no effect."""

    target: str
    convert: Callable[[Any], Any] = lambda value: value


def _as_epochs(value: Any) -> Any:
    return None if value == -1 else value


MOVED: Mapping[str, Moved] = {
    f"{_POLICY}.model_args.disable_gradient_checkpointing": Moved(
        f"{_TRAINING}.gradient_checkpointing", lambda value: not value
    ),
    f"{_POLICY}.model_args.ulysses_size": Moved(f"{_POLICY}.strategy_args.strategy_config.cp_size"),
    f"{_POLICY}.infer_batch_size": Moved(f"{_TRAINING}.per_device_eval_batch_size"),
    f"{_POLICY}.max_tokens_per_microbatch_in_train": Moved(f"{_TRAINING}.max_tokens_per_micro_batch"),
    f"{_POLICY}.data_args.eval_file_name": Moved("validation.data_args.file_name"),
    f"{_POLICY}.data_args.prompt": Moved("prompt_key"),
    f"{_TRAINING}.num_train_epochs": Moved("num_train_epochs", _as_epochs),
    f"{_TRAINING}.max_steps": Moved("max_steps"),
    f"{_TRAINING}.seed": Moved("seed"),
    f"{_TRAINING}.output_dir": Moved("output_dir"),
    # mcore_adapter's switch
    "use_ref_model": Moved("reference.mode", lambda value: "auto" if value else "none"),
    "max_grad_norm": Moved(f"{_TRAINING}.max_grad_norm"),
    "max_ckpt_to_keep": Moved("save_total_limit", lambda value: value or None),  # 0 keeps all in ROLL
    "tracker_kwargs.project": Moved("tracker_kwargs.wandb_project"),
    "tracker_kwargs.mode": Moved("tracker_kwargs.wandb_mode"),
    "tracker_kwargs.api_key": Moved("tracker_kwargs.wandb_api_key"),
    "tracker_kwargs.log_dir": Moved("tracker_kwargs.tensorboard_dir"),
}

_PACKED = "rows are packed by tokens here; see layout and max_tokens_per_micro_batch"
_NO_GENERATION = "thresher does not generate"
_NO_GRADIENTS = "the reference has no gradients"
_OWN_WORKERS = "thresher starts its own workers"
_VLLM = "a setting of vLLM, which reserves this share of a GPU; no engine here reserves memory"
# keys without an effect here, and why; `*` stands for either role
WITHOUT_EFFECT: Mapping[str, str] = {
    "base_dir": "output_dir is the run directory",
    "checkpoint_config": "checkpoints stay in output_dir; `thresher export` writes the model",
    "is_offload_states": "a precomputed reference leaves the devices before training; see strategy_config.cpu_offload",
    "is_offload_optimizer_states_in_train_step": "use strategy_config.cpu_offload to keep optimizer states on the host",
    "local_rank": _OWN_WORKERS,
    "model_download_type": "models are read from a directory or from the Hugging Face hub",
    "model_update_buffer_size_mb": _NO_GENERATION,
    "num_nodes": "the nodes follow from device_mapping and num_gpus_per_node",
    "profiler_memory": "thresher has no profiler switch",
    "profiler_timeline": "thresher has no profiler switch",
    "profiler_output_dir": "thresher has no profiler switch",
    "prompt_length": "sequence_length limits prompt plus response",
    "rollout_batch_size": _NO_GENERATION,
    "rpc_timeout": "heartbeat_timeout detects workers that hang",
    "val_batch_size": "per_device_eval_batch_size sets the evaluation batch",
    "val_prompt_length": "sequence_length limits validation pairs too",
    "val_sequence_length": "sequence_length limits validation pairs too",
    "*.apply_loss_scale": "the mean over all pairs of a step is exact for every layout",
    "*.backend_timeout": "heartbeat_timeout detects workers that hang",
    "*.logits_in_fp32": "logps are always computed in fp32",
    "*.max_tokens_per_microbatch_in_infer": _PACKED,
    "*.model_args.device_map": "device_mapping places the model",
    "*.model_args.gradient_checkpointing_use_reentrant": "checkpointing is never reentrant",
    "*.name": _OWN_WORKERS,
    "*.num_gpus_per_worker": "a worker has one device",
    "*.offload_nccl": "thresher has no such switch",
    "*.sequence_length_round_in_infer": _PACKED,
    "*.sequence_length_round_in_train": _PACKED,
    "*.sequence_packing_args": _PACKED,
    "*.use_dynamic_batching_in_infer": _PACKED,
    "*.use_dynamic_batching_in_train": _PACKED,
    "*.use_sequence_packing": _PACKED,
    "*.strategy_args.gpu_memory_utilization": _VLLM,
    "*.strategy_args.strategy_config.gpu_memory_utilization": _VLLM,
    "*.worker_cls": _OWN_WORKERS,
    f"{_POLICY}.data_args.dataset_type": "the type follows from the file name",
    f"{_TRAINING}.bf16": "model_args.dtype sets the precision",
    f"{_TRAINING}.fp16": "model_args.dtype sets the precision",
    f"{_TRAINING}.dataloader_num_workers": "pairs are read from a memory-mapped store",
    f"{_REFERENCE}.model_args.disable_gradient_checkpointing": _NO_GRADIENTS,
}
# ROLL renders these with the tokenizer's own chat template
TOKENIZER_TEMPLATES = ("native", "qwen2_5")


def translate(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a config without ROLL's own keys, and one line per key that says what became of it."""
    config = copy.deepcopy(dict(values))
    notes: list[str] = []
    for key, reason in without_effect().items():
        if _pop(config, key) is not _ABSENT:
            notes.append(f"{key} has no effect: {reason}")
    for key, (target, convert) in MOVED.items():
        value = _pop(config, key)
        if value is None or value is _ABSENT:
            continue
        if target.endswith("per_device_eval_batch_size") and not config.get("validation"):
            notes.append(f"{key} has no effect without validation.data_args")
            continue
        if (ours := convert(value)) is None:
            notes.append(f"{key}: {value} has no effect")
            continue
        _move(config, key, target, ours)
        leaf = target.rpartition(".")[2]
        notes.append(f"{key} is read as {target}: {redact({leaf: ours})[leaf]}")
    notes += [
        note for special in (_template, _resume, _warmup, _ipo, _lora_target, _adapter) if (note := special(config))
    ]
    return config, notes


def _template(config: dict[str, Any]) -> str | None:
    """Apply global_template to the data that names no template of its own."""
    name = _pop(config, "global_template")
    if name is None or name is _ABSENT:
        return None
    template = "auto" if name in TOKENIZER_TEMPLATES else name
    for section in (_POLICY, "validation"):
        if section == _POLICY or _section(config, f"{section}.data_args"):
            _set_default(config, f"{section}.data_args.template", template)
    meaning = "the tokenizer's own chat template, as in ROLL" if template == "auto" else f"template: {name}"
    return f"global_template is read as data_args.template of the training and validation pairs ({meaning})"


def _resume(config: dict[str, Any]) -> str | None:
    if config.get("resume_from_checkpoint") is not True:
        return None
    return "resume_from_checkpoint: true is read as auto: resume from the newest checkpoint in output_dir"


def _warmup(config: dict[str, Any]) -> str | None:
    training = _section(config, _TRAINING)
    if training.get("lr_scheduler_type") != "constant" or not (
        training.get("warmup_steps") or training.get("warmup_ratio")
    ):
        return None
    training["lr_scheduler_type"] = "constant_with_warmup"
    return "lr_scheduler_type: constant with a warm-up is read as constant_with_warmup"


def _ipo(config: dict[str, Any]) -> str | None:
    if config.get("ipo") is not True or "pref_loss" in config or config.get("length_normalization"):
        return None
    return "ipo: true is ROLL's IPO on summed logps, pref_loss: ipo_sum; pref_loss: ipo averages over tokens"


def _adapter(config: dict[str, Any]) -> str | None:
    if _section(config, f"{_POLICY}.model_args").get("adapter_name_or_path") is None:
        return None
    return "the reference starts from adapter_name_or_path too; ROLL's reference is the model without it"


def _lora_target(config: dict[str, Any]) -> str | None:
    model = _section(config, f"{_POLICY}.model_args")
    target = model.get("lora_target")
    if not isinstance(target, str):
        return None
    names = [name.strip() for name in target.split(",") if name.strip()]
    model["lora_target"] = ["all-linear" if name == "all" else name for name in names]
    return "lora_target: all is read as all-linear" if "all" in names else None


_ABSENT = object()


def without_effect() -> dict[str, str]:
    """The keys without an effect, for either role."""
    roles = (_POLICY, _REFERENCE)
    return {key.replace("*", role): reason for key, reason in WITHOUT_EFFECT.items() for role in roles}


def _section(config: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a section, or an empty one that is not part of the config."""
    section: Any = config
    for name in path.split("."):
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else {}


def _pop(config: dict[str, Any], path: str) -> Any:
    parent, _, key = path.rpartition(".")
    return (_section(config, parent) if parent else config).pop(key, _ABSENT)


def _set_default(config: dict[str, Any], path: str, value: Any) -> Any:
    """Set a key that is absent, with its sections; return the value that the key then has."""
    *parents, key = path.split(".")
    for name in parents:
        if config.get(name) is None:
            config[name] = {}
        config = config[name]
        if not isinstance(config, dict):  # validation reports it
            return value
    return config.setdefault(key, value)


def _move(config: dict[str, Any], source: str, target: str, value: Any) -> None:
    if _set_default(config, target, value) != value:
        raise UserError(
            f"invalid configuration:\n  - {source} (ROLL's name) and {target} are both set and differ; keep {target}"
        )
